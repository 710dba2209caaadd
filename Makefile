# Build: make [PG_CONFIG=...]; install: make install; test a running server
# that has it: make installcheck. ./scripts/test does all of it by itself.

MODULE_big = idem
OBJS = src/idem.o src/canonical.o src/number.o src/fingerprint.o src/key.o src/scope.o \
	src/held.o src/lookup.o src/ledger.o src/decide.o src/claim.o src/settle.o src/explain.o src/admin.o src/sweep.o \
	src/stats.o src/worker.o

EXTENSION = idem
DATA = idem--1.0.sql
PGFILEDESC = "idem - an operation happens exactly once"

REGRESS = $(patsubst sql/%.sql,%,$(sort $(wildcard sql/*.sql)))
ISOLATION = $(patsubst specs/%.spec,%,$(sort $(wildcard specs/*.spec)))
TAP_TESTS = 1

PG_CPPFLAGS = -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

$(OBJS): src/idem.h
src/canonical.o src/number.o src/fingerprint.o: src/canonical.h

# what PGXN takes: the committed files under one directory
DISTVERSION = $(shell sed -n 's/^   "version": "\(.*\)",/\1/p' META.json)
.PHONY: dist
dist:
	git archive --format=zip --prefix=idem-$(DISTVERSION)/ --output=idem-$(DISTVERSION).zip HEAD
