# callgrind.sh - counts instructions of statements; instructions and run source it
# after ../scripts/setup.sh.
#
#   loop_block STATEMENTS TURNS FIRST [COMMIT]   SQL: a loop around them
#   count_add NAME STATEMENTS [COMMIT [SETTING]] remembers what is to be counted
#   count_all DATA                               counts, into COST[NAME]
#   count_profile                                of what was counted last, by function
#
# One single-user server under callgrind runs all loops, each with three lengths: the first
# one brings caches and plans into the backend, the other two are measured. callgrind
# counts each DO block by itself, from the function that executes it to its
# end; the difference of the two lengths is the cost of the turns alone.

SHORT=200		# lengths of the two loops
LONG=800
COUNTED=()
declare -A COST COUNT_LOOP COUNT_COMMIT COUNT_SETTING

# New keys look like the ones applications make; all loops make them alike. i is
# the turn, k a new key, old a stored one; f, g are fingerprints, h the bytes of f.
loop_block()
{
	cat <<-SQL
		DO \$\$
		DECLARE
			a idem_answer; b boolean; s text; t bigint; row record; h bytea := sha256('request');
			f idem_digest := h::idem_digest; g idem_digest := sha256('another')::idem_digest;
			k text; old text := 'order:key:1000000000000001'; r json := '{"id":"ch_3NG8Du2eZvKYlo2C","paid":true}';
			rb jsonb := r; q jsonb := '{"amount": 1, "account": 1}'; doc text := (SELECT d.doc FROM bench.doc AS d);
		BEGIN
			FOR i IN $3 .. $3 + $2 - 1 LOOP
				k := 'order:key:' || (1000000000000000 + i);
				$1
				${4:+COMMIT;}
			END LOOP;
		END \$\$;
	SQL
}

count_add()
{
	COUNTED+=("$1")
	COUNT_LOOP[$1]=$2
	COUNT_COMMIT[$1]=${3:-}
	COUNT_SETTING[$1]=${4:-}
}

# The single-user server reads a statement a line.
one_line()
{
	tr '\n\t' '  '
	echo
}

count_all()
{
	local data=$1 out=$WORK/callgrind name turns first=1000000 part=0 total=()

	[ ${#COUNTED[@]} != 0 ] || return 0
	rm -f "$out"*
	for name in "${COUNTED[@]}"; do
		[ -z "${COUNT_SETTING[$name]}" ] || one_line <<<"${COUNT_SETTING[$name]}"
		for turns in 50 $SHORT $LONG; do
			first=$((first + 1000))		# not in the pipeline, which is a subshell
			loop_block "${COUNT_LOOP[$name]}" $turns $first "${COUNT_COMMIT[$name]}" | one_line
		done
		[ -z "${COUNT_SETTING[$name]}" ] || echo "RESET ALL;"
	done >"$WORK/input.sql"
	as_user valgrind --tool=callgrind --callgrind-out-file="$out" --zero-before=ExecuteDoStmt --dump-after=ExecuteDoStmt \
		"$BIN/postgres" --single -D "$data" -c fsync=off -c log_min_messages=warning ${COUNT_OPTIONS:-} postgres \
		<"$WORK/input.sql" >"$WORK/single.log" 2>&1 || { cat "$WORK/single.log" >&2; die "the single-user server failed"; }
	! grep -E 'ERROR|FATAL|PANIC' "$WORK/single.log" >&2 || die "a measured statement failed"

	for name in "${COUNTED[@]}"; do
		total=()
		for turns in 1 2 3; do
			part=$((part + 1))
			total+=("$(sed -n 's/^totals: //p' "$out.$part")")
		done
		COST[$name]=$(((total[2] - total[1]) / (LONG - SHORT)))
	done
	LAST_PART=$out.$part BEFORE_LAST=$out.$((part - 1))
	COUNTED=()
}

# The functions of one part, with all that they call. Without debugging symbols
# the server's own static functions have no names, and are left out.
functions_of()		# PART
{
	callgrind_annotate --auto=no --threshold=100 --inclusive=yes "$1" |
		sed -nE "s/^ *([0-9,]+) \\([^)]*\\) +[^ ]*:([A-Za-z_][A-Za-z_0-9]*)( .*|$)/\\1 \\2/p" | tr -d ,
}

count_profile()
{
	awk -v turns=$((LONG - SHORT)) '
		# a function with inlined parts comes once for each file they are from
		FNR == NR { if ($1 > less[$2]) less[$2] = $1; next }
		{ if ($1 > more[$2]) more[$2] = $1 }
		END {
			for (name in more) {
				cost = (more[name] - less[name]) / turns
				if (cost >= 1000)
					printf "%9d  %s\n", cost, name
			}
		}' <(functions_of "$BEFORE_LAST") <(functions_of "$LAST_PART") | sort -rn
}
