# setup.sh - what demo, test and bench/instructions share; they source it.
#
#   setup_prepare [PACKAGE...]   packages, a private PostgreSQL, idem built into it
#   setup_server [SETTING...]    a throw-away cluster, running
#   lend_drivers                 what the tests of drivers use, as far as it can be had
#
# Everything happens in one temporary directory that goes away at the end. The
# PostgreSQL in it is a copy of the installed one (PostgreSQL finds its files
# relative to its programs, so a copy works), and idem is installed into that
# copy: the machine's own PostgreSQL and its clusters are never touched.
#
# In the environment: PG_CONFIG chooses another PostgreSQL than the newest one
# installed; KEEP=1 leaves the temporary directory behind; NO_DRIVERS=1 brings
# nothing along that only the tests of drivers use. scripts/harden and
# scripts/coverage also set IDEM_COPT (more compiler options), IDEM_POSTGRES (a
# program that is started in place of postgres) and IDEM_KEEP_OBJECTS (a
# directory that the build is copied to in the end).

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SETUP_OLDEST=15				# oldest PostgreSQL that idem supports
SETUP_PG_CONFIG=${PG_CONFIG:-}

# What the caller's shell holds for psql, make and sorting decides nothing here.
unset "${!PG@}" MAKEFLAGS MFLAGS MAKELEVEL
export LC_ALL=C.UTF-8
umask 022

# ---- messages ----

say()	{ printf '%s\n' "$*"; }
step()	{ printf '%-12s %s\n' "$1" "$2"; }
die()	{ printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# Runs quietly; what it printed is shown only if it fails.
quietly()
{
	local log=$WORK/quiet.log
	run "$@" >"$log" 2>&1 && return
	cat "$log" >&2
	return 1
}

# In the background and waited for, so that a signal is acted upon at once.
run()
{
	"$@" <&0 &
	wait $!
}

# ---- the end, however it comes ----

setup_cleanup()
{
	local status=$? pidfile pid

	trap '' INT TERM HUP
	trap - EXIT
	cd /
	for pid in $(jobs -p); do
		kill -- "-$pid" 2>/dev/null || true
	done

	# the server of this script, and those that interrupted tests left behind
	find "$WORK" -name postmaster.pid 2>/dev/null | while read -r pidfile; do
		pid=$(head -n 1 "$pidfile" 2>/dev/null) || continue
		as_user "$BIN/pg_ctl" -D "$(dirname "$pidfile")" -m immediate -w stop >/dev/null 2>&1 ||
			kill -KILL "$pid" 2>/dev/null || true
	done

	wait 2>/dev/null || true
	[ -z "${IDEM_KEEP_OBJECTS:-}" ] || cp -a "${SOURCE:-}/." "$IDEM_KEEP_OBJECTS" 2>/dev/null || true
	if [ -n "${KEEP:-}" ]; then
		say "kept: $WORK"
	else
		rm -rf "$WORK"
	fi
	exit $status
}

# ---- who ----

# PostgreSQL refuses to run as root: root becomes postgres, others stay themselves.
as_user()
{
	if [ "$(id -u)" = 0 ]; then
		setpriv --reuid=postgres --regid=postgres --init-groups \
			env HOME="$WORK" USER=postgres LOGNAME=postgres "$@"
	else
		"$@"
	fi
}

as_root()
{
	if [ "$(id -u)" = 0 ]; then
		"$@"
	elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
		sudo "$@"
	else
		return 1
	fi
}

# ---- which packages ----

have_package()
{
	dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed
}

# The newest major installed, else the one that the distribution has.
choose_major()
{
	local major

	for major in $(ls /usr/lib/postgresql 2>/dev/null | grep -E '^[0-9]+$' | sort -rn); do
		if [ "$major" -ge $SETUP_OLDEST ] && [ -x /usr/lib/postgresql/$major/bin/postgres ]; then
			echo "$major"
			return
		fi
	done
	# without package lists apt knows none, which is no error here
	{ apt-cache depends postgresql 2>/dev/null || true; } | sed -n 's/^ *Depends: postgresql-\([0-9]*\)$/\1/p'
}

apt_update()
{
	[ -z "${APT_UPDATED:-}" ] || return 0
	APT_UPDATED=1
	step Updating "the package lists"
	quietly as_root env DEBIAN_FRONTEND=noninteractive apt-get -q update
}

must_be_root()
{
	as_root true || die "these packages are missing: $*
Install them, or run this as root or with sudo."
}

install_packages()
{
	local common=/etc/postgresql-common/createcluster.d no_cluster=

	must_be_root "$@"
	apt_update || die "apt-get update failed; these packages are missing: $*"
	step Installing "$*"

	# a server package would make and start a cluster; nobody asked for one
	if [[ $* = *postgresql-[0-9]* ]]; then
		no_cluster=$common/idem-scripts.conf
		as_root mkdir -p $common
		echo 'create_main_cluster = false' | as_root tee $no_cluster >/dev/null
	fi
	quietly as_root env DEBIAN_FRONTEND=noninteractive \
		apt-get -q install -y --no-install-recommends "$@" || {
			[ -z "$no_cluster" ] || as_root rm -f "$no_cluster"
			die "apt-get could not install: $*"
		}
	[ -z "$no_cluster" ] || as_root rm -f "$no_cluster"
}

# gcc alone does not say whether it can compile: the C library's headers count.
require_packages()
{
	local missing=() package

	command -v apt-get >/dev/null || {
		command -v gcc >/dev/null && command -v make >/dev/null ||
			die "gcc and make are needed, and there is no apt-get to install them with"
		return 0
	}
	if [ -z "$SETUP_PG_CONFIG" ]; then
		MAJOR=$(choose_major)
		if [ -z "$MAJOR" ]; then
			must_be_root gcc libc6-dev make perl libipc-run-perl postgresql
			apt_update || die "apt-get update failed, and no PostgreSQL is installed"
			MAJOR=$(choose_major)
		fi
		[ -n "$MAJOR" ] || die "no PostgreSQL is installed, and apt-get knows none"
		[ "$MAJOR" -ge $SETUP_OLDEST ] || die "PostgreSQL $MAJOR is too old: idem needs $SETUP_OLDEST or newer"
		set -- "postgresql-$MAJOR" "$@"
	fi
	for package in gcc libc6-dev make perl libipc-run-perl "$@"; do
		have_package "$package" || missing+=("$package")
	done
	[ ${#missing[@]} = 0 ] || install_packages "${missing[@]}"
}

# ---- the private PostgreSQL ----

# The same file below the private directory as in the file system.
mirror_directory()
{
	mkdir -p "$PRIVATE$(dirname "$1")"
	[ -e "$PRIVATE$1" ] || cp -a "$1" "$PRIVATE$1"
}

# The server's headers are only unpacked into the private copy. To install
# their package would drag in a gigabyte of clang and LLVM that nothing here
# uses, and could upgrade, and so restart, the servers of this machine.
unpack_headers()
{
	local package=postgresql-server-dev-$MAJOR directory=$WORK/download

	mkdir "$directory"
	# as root, apt would complain that its own user cannot write here
	apt_get() { (cd "$directory" && quietly apt-get -q -o APT::Sandbox::User="$(id -un)" download "$@"); }
	step Fetching "$package"
	apt_get "$package=$SERVER_VERSION" 2>/dev/null || apt_get "$package" 2>/dev/null ||
		{ as_root true && apt_update && apt_get "$package"; } ||
		die "the package $package is missing and could not be fetched: install it"
	dpkg-deb -x "$directory"/*.deb "$PRIVATE"
	rm -r "$directory"
}

make_private_postgresql()
{
	local pg_config=$SETUP_PG_CONFIG directory headers

	if [ -z "$pg_config" ]; then
		pg_config=/usr/lib/postgresql/$MAJOR/bin/pg_config
		SERVER_VERSION=$(dpkg-query -W -f '${Version}' "postgresql-$MAJOR")
	fi
	# a full path also where it was a wrapper or found by PATH
	pg_config=$("$pg_config" --bindir)/pg_config || die "cannot run $pg_config"

	PRIVATE=$WORK/postgresql
	for directory in --bindir --sharedir --pkglibdir; do
		mirror_directory "$("$pg_config" $directory)"
	done
	headers=$("$pg_config" --includedir-server)
	if [ -e "$headers/postgres.h" ]; then
		mirror_directory "$headers"
	elif [ -z "$SETUP_PG_CONFIG" ]; then
		unpack_headers
	else
		die "$headers/postgres.h is missing: install the headers of this PostgreSQL"
	fi

	PG_CONFIG=$PRIVATE$pg_config
	BIN=$(dirname "$PG_CONFIG")
	VERSION=$("$PG_CONFIG" --version)
	[ -x "$BIN/postgres" ] || die "there is no server beside $pg_config"
}

# ---- the drivers ----

# What the tests of drivers and poolers use. Nothing here is required: what
# cannot be had is skipped by its test, which says so. A JDK is 125 MB:
# it is brought along where CI is set, else used where it is. PgBouncer's package
# would start a server: only the program is unpacked.
lend_drivers()
{
	local missing=() package directory=$WORK/pgbouncer

	[ -z "${NO_DRIVERS:-}" ] && command -v apt-get >/dev/null && as_root true || return 0
	[ -z "${CI:-}" ] || command -v javac >/dev/null || (install_packages default-jdk-headless) || true
	[ -x /usr/sbin/pgbouncer ] || missing+=($(pooler_libraries))
	for package in python3-psycopg2 python3-psycopg libpq-dev libpostgresql-jdbc-java node-pg; do
		[ "$package" != libpostgresql-jdbc-java ] || command -v javac >/dev/null || continue
		# where there is npm, it brings the module without another node
		[ "$package" != node-pg ] || ! command -v npm >/dev/null || continue
		have_package "$package" || ! apt-cache show "$package" >/dev/null 2>&1 || missing+=("$package")
	done
	[ ${#missing[@]} = 0 ] || (install_packages "${missing[@]}") ||
		step Skipping "the drivers whose packages could not be installed"
	if [ ! -x /usr/sbin/pgbouncer ]; then
		mkdir "$directory"
		if (cd "$directory" && quietly apt-get -q -o APT::Sandbox::User="$(id -un)" download pgbouncer) 2>/dev/null; then
			dpkg-deb -x "$directory"/*.deb "$directory"
			export PATH=$PATH:$directory/usr/sbin
		fi
	fi
	if command -v npm >/dev/null && ! have_package node-pg; then
		quietly npm install --silent --no-audit --no-fund --cache "$WORK/npm" --prefix "$WORK/node" pg@8 2>/dev/null ||
			step Skipping "node-postgres, which npm could not install"
		export NODE_PATH=$WORK/node/node_modules
	fi
	[ "$(id -u)" != 0 ] || chmod -R a+rX "$WORK/node" "$directory" 2>/dev/null || true
}

# PgBouncer's own libraries; their names change with Debian's releases.
pooler_libraries()
{
	{ apt-cache depends pgbouncer 2>/dev/null || true; } | sed -n 's/^ *Depends: \(libevent[^ ]*\|libc-ares[^ ]*\)$/\1/p'
}

# ---- the extension ----

copy_sources()
{
	SOURCE=$WORK/source
	mkdir "$SOURCE"
	tar -C "$ROOT" --exclude=./.git --exclude='*.o' --exclude='*.so' --exclude='*.bc' \
		--exclude=./tmp_check --exclude=./results --exclude=./output_iso -cf - . | tar -C "$SOURCE" -xf -
}

# with_llvm=no: bitcode for the JIT compiler needs clang and adds nothing here.
in_source()
{
	run as_user make -s -C "$SOURCE" PG_CONFIG="$PG_CONFIG" with_llvm=no "$@"
}

setup_prepare()
{
	WORK=$(mktemp -d /tmp/idem.XXXXXX)		# short: a socket's path has a limit
	BIN=
	set -m					# a process group for each job, so that all of it can be ended
	trap setup_cleanup EXIT
	trap 'exit 129' HUP
	trap 'exit 130' INT
	trap 'exit 143' TERM
	cd "$WORK"

	require_packages "$@"
	make_private_postgresql
	copy_sources
	mkdir "$WORK/tmp"
	if [ "$(id -u)" = 0 ]; then
		id postgres >/dev/null 2>&1 || die "there is no user postgres, and PostgreSQL does not run as root"
		chown -Rh postgres:postgres "$WORK"
	fi
	export TMPDIR=$WORK/tmp			# what tests leave behind goes away, too
	step Building "idem for $VERSION"
	in_source COPT="-Werror ${IDEM_COPT:-}" -j2 all || die "idem could not be built"
	in_source install >"$WORK/install.log" 2>&1 || { cat "$WORK/install.log" >&2; die "idem could not be installed"; }
}

# ---- the server ----

# Arguments are settings (name=value). Only a socket, in a directory of our own.
setup_server()
{
	local setting

	# the user that the server runs as may not be able to read the caller's files
	[ -z "${IDEM_POSTGRES:-}" ] || install -m 755 "$IDEM_POSTGRES" "$WORK/start-postgres"
	SERVER_OPTIONS="-c listen_addresses='' -c unix_socket_directories='$WORK' -c unix_socket_permissions=0700"

	for setting in "fsync=off" "$@"; do
		SERVER_OPTIONS+=" -c $setting"
	done
	quietly as_user "$BIN/initdb" -D "$WORK/data" -U postgres -A trust --no-sync -E UTF8 --locale=C.UTF-8 ||
		die "initdb failed"
	quietly as_user env BIN="$BIN" "$BIN/pg_ctl" ${IDEM_POSTGRES:+-p "$WORK/start-postgres"} \
		-D "$WORK/data" -l "$WORK/server.log" -o "$SERVER_OPTIONS" -w -t 300 start || {
		cat "$WORK/server.log" >&2
		die "the server did not start"
	}
	export PGHOST=$WORK PGUSER=postgres PGDATABASE=postgres
}

# psql that stops at the first error and reads nobody's .psqlrc
sql()
{
	as_user "$BIN/psql" -X -q -v ON_ERROR_STOP=1 "$@"
}
