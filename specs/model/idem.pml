/*
 * idem.pml - the protocol of one key, for the spin model checker.
 *
 * N clients (three) and a clock, one key, nothing bounded: every client goes
 * on for ever, in any order, with everything that a client, an operator and
 * the sweep can do. specs/model/README.md says how to run it and what it says;
 * src/held.c has the argument in words. "Why is this one step?" is answered
 * where a step stands.
 *
 * What is abstracted
 * - A key has one row (S, F: in idem.result or its archive; P, E, U: in
 *   idem.inflight), committed; and beside it what each transaction has written
 *   and not committed, for the transaction and for its savepoint. Whoever
 *   probes sees both, as a dirty snapshot does.
 * - The model has no unique index. The protocol must not lean on one: two rows
 *   of a key would be an error where an answer is promised.
 * - Time is a process that ends a lease or a retention whenever it likes.
 * - A token is the set of the clients that know it: tokens are only compared,
 *   and a client remembers one.
 * - A claim waits as long as it takes; a shorter wait is a rollback.
 *
 * What a client is trusted with
 * - It writes its effect in the transaction that completes, once, and not
 *   where it fails or releases.
 * - It treats a COMMIT without an answer as unknown: it forgets its token and
 *   claims again. (Clients 0 and 1 are one claimant, so the session that got
 *   no answer may be running still, with the same token.)
 * - It may trap any error, forget to settle, hold a lost lease and never
 *   know, and end anywhere.
 */

#ifndef N
#define N 3
#endif

/* ---- mutations: specs/model/check shows that each of them fails ---- */

#define NONE					0
#define PROBE_BEFORE_LOCK		1	/* what is decided from was seen before the lock */
#define UNLOCK_BEFORE_ROW		2	/* the lock is given back before the row is there */
#define OLD_TOKEN				3	/* a token is not compared */
#define LOCK_NOT_KEPT			4	/* settled in a child: the lock is not kept for the parent's claim */
#define WAIT_WITH_LOCK			5	/* the lock is held while a transaction is waited for */
#define TRAPPED_COMMITS			6	/* ID001, trapped, does not doom the transaction */
#define REPEAT_COMMITS			7	/* who settles what was settled with its token may commit work beside it */
#define UNSETTLED_COMMITS		8	/* no ID003 */
#define CLAIM_SURVIVES			9	/* a claim is not forgotten when its subtransaction is rolled back */
#define EARLY_TAKEOVER			10	/* a running lease is taken over */
#define RESOLVE_SETTLED			11	/* an operator resolves what is not in doubt */
#define SWEEP_IGNORES_LOCK		12	/* the sweep changes a row without the key's lock */
#define COMMITTED_ONLY			13	/* an uncommitted row is not seen: no dirty snapshot */
#define ABORT_KEEPS_LOCK		14	/* a rollback does not give the lock back */

#ifndef MUTATION
#define MUTATION NONE
#endif

/* ---- rows ---- */

#define P	1	/* processing, under a lease */
#define E	2	/* free again */
#define U	3	/* in doubt */
#define S	4	/* succeeded, and by whose word: its holder's */
#define F	5	/* failed */
#define SO	6	/* succeeded, says an operator */
#define FO	7
#define DEL	8	/* what is written is: no row */

#define LETTER(k)		((k) == P -> 'P' : ((k) == E -> 'E' : ((k) == U -> 'U' : ((k) == S || (k) == SO -> 'S' : 'F'))))
#define SETTLED(k)		((k) >= S && (k) <= FO)
#define INFLIGHT(k)		((k) >= P && (k) <= U)

/* past: of P, the lease is over; of a settled row, the retention */
#define OVER			1	/* free by the clock */
#define DOUBT			2	/* in doubt by the clock: hold, attempts spent, too late to retry */

/* the committed row */
byte ck, ctok, cpast;
bool cclaimant;

/* ghost: effects committed since the key was last new */
byte effects;

/* the key lock: who has it, 0: nobody */
byte lock;

/* ---- clients ---- */

/* where a client is */
#define FREE	0	/* outside, or idle in its transaction */
#define LOCKING	1	/* wants the key lock */
#define PROBING	2	/* has it, and has looked at idem.result */
#define WRITING	3	/* has decided (mutations only) */
#define WAITING	4	/* waits for another's transaction to end */

/* what for */
#define CLAIM	1
#define TOKEN	2	/* complete, fail, release, extend, unknown with a token */
#define RESOLVE	3

/* a transaction-scoped claim of the transaction, or of its savepoint */
#define OPEN	1
#define INSIDE	2	/* settled in a savepoint that is open still */
#define FREED	3	/* released there */

/* What comes of a step of a client, as part of it. */
#define DECIDE		1
#define WAIT		2
#define LOST		3
#define ERROR		4
#define DONE		5
#define COMMIT		6
#define KEEP		7
#define UNDO		8
#define ROLLBACK	9
#define COMMITTED	10

typedef Client
{
	unsigned st : 3;
	unsigned op : 2;
	unsigned waits : 2;		/* WAITING: for whom */
	unsigned lvl : 2;		/* 0 no transaction, 1 in one, 2 in a savepoint of it */
	unsigned w1 : 4;		/* written by the transaction */
	unsigned w1tok : 3;
	unsigned w2 : 4;		/* written by the savepoint */
	unsigned w2tok : 3;
	unsigned c1 : 2;		/* claims */
	unsigned c2 : 2;
	unsigned tok : 2;		/* 0 none, 1 has a token, 2 got it in this transaction, 3 in this savepoint */
	bool w1claimant;
	bool w2claimant;
	bool f1;				/* a released claim keeps the lock */
	bool f2;
	bool e1;				/* the effect was written */
	bool e2;
	bool doomed;
	bool late;				/* settled again what was settled with this token before */
	/* PROBE_BEFORE_LOCK, UNLOCK_BEFORE_ROW: what was seen */
	unsigned seen : 4;
	unsigned seenpast : 2;
	unsigned seentok : 3;
	unsigned busy : 2;		/* whose the row is, 0: nobody's, else client + 1 */
}

Client c[N];

/* What is promised; spin's trail shows the text. */
#define PROMISE(condition, text) \
	if \
	:: !(condition) -> printf(text); assert(false) \
	:: else \
	fi


#define ME				c[me]
#define MYSELF			(1 << me)
#if MUTATION == EARLY_TAKEOVER
#define NAMED			false
#else
#define NAMED			(me <= 1)		/* claims under the name that clients 0 and 1 have in common */
#endif
#define HAS_CLAIM(i)	(c[i].c1 == OPEN || c[i].c2 == OPEN)
#define KEEPS(i)		(c[i].c1 || c[i].c2 || c[i].f1 || c[i].f2)
#define WROTE(i)		(c[i].w1 || c[i].w2)
#define EFFECT(i)		(c[i].e1 || c[i].e2)
#define OWNROW(i)		(c[i].w2 -> c[i].w2 : c[i].w1)
#define EMPTY(i)		(!KEEPS(i) && !WROTE(i) && !EFFECT(i))

/* Is the row that a probe of that table finds another's still? */
#if MUTATION == COMMITTED_ONLY
#define BUSY(i, IN)		false
#else
#define BUSY(i, IN)		(WROTE(i) && (IN(ck) || IN(c[i].w1) || IN(c[i].w2)))
#endif

#if N == 3
#define OTHER1(me)		((me + 1) % 3)
#define OTHER2(me)		((me + 2) % 3)
#else
#define OTHER1(me)		(1 - me)
#define OTHER2(me)		(1 - me)
#endif

#define IDLE			(ME.st == FREE && !ME.lvl)
#define IN_TRANSACTION	(ME.st == FREE && ME.lvl)
#define MAY_CLAIM		(!HAS_CLAIM(me) && !EFFECT(me) && !ME.doomed && (!WROTE(me) || OWNROW(me) == E))
#define MAY_SETTLE		(ME.tok && (!WROTE(me) || INFLIGHT(OWNROW(me))))
#define OTHERS_WROTE	(WROTE(OTHER1(me)) || WROTE(OTHER2(me)))

/*
 * Nobody waits for ever. Who waits for the lock waits for its owner, who waits
 * for a transaction for its client; both have a transaction, and nobody waits
 * in a circle. So all that is waited for is that transactions end.
 */
#define WAITS_FOR(i, j) \
	((c[i].st == LOCKING && lock == j + 1 && i != j) || (c[i].st == WAITING && c[i].waits == j))

inline check_waits()
{
	PROMISE(lock == 0 || c[lock - 1].lvl > 0, "broken: no lock outlives its transaction\n");
	PROMISE(!(WAITS_FOR(0, 1) && WAITS_FOR(1, 0)), "broken: nobody waits for ever\n");
#if N == 3
	PROMISE(!(WAITS_FOR(0, 2) && WAITS_FOR(2, 0)), "broken: nobody waits for ever\n");
	PROMISE(!(WAITS_FOR(1, 2) && WAITS_FOR(2, 1)), "broken: nobody waits for ever\n");
	PROMISE(!(WAITS_FOR(0, 1) && WAITS_FOR(1, 2) && WAITS_FOR(2, 0)), "broken: nobody waits for ever\n");
	PROMISE(!(WAITS_FOR(0, 2) && WAITS_FOR(2, 1) && WAITS_FOR(1, 0)), "broken: nobody waits for ever\n");
#endif
}

/* Gives the lock back, unless a claim of this transaction keeps it. */
inline unlock()
{
	if
	:: lock == me + 1 && !KEEPS(me) -> lock = 0
	:: else
	fi
}

/* Who waits for a transaction of mine looks again: it has ended, or a part of it was undone. */
inline wake()
{
	if
	:: c[OTHER1(me)].st == WAITING && c[OTHER1(me)].waits == me ->
		c[OTHER1(me)].st = LOCKING; c[OTHER1(me)].waits = 0
	:: else
	fi;
	if
	:: c[OTHER2(me)].st == WAITING && c[OTHER2(me)].waits == me ->
		c[OTHER2(me)].st = LOCKING; c[OTHER2(me)].waits = 0
	:: else
	fi
}

inline forget_token()
{
	ME.tok = 0;
	ctok = ctok & ~MYSELF;
	c[0].w1tok = c[0].w1tok & ~MYSELF; c[0].w2tok = c[0].w2tok & ~MYSELF;
	c[1].w1tok = c[1].w1tok & ~MYSELF; c[1].w2tok = c[1].w2tok & ~MYSELF;
	c[N - 1].w1tok = c[N - 1].w1tok & ~MYSELF; c[N - 1].w2tok = c[N - 1].w2tok & ~MYSELF
}

inline forget_seen()
{
	ME.seen = 0; ME.seenpast = 0; ME.seentok = 0; ME.busy = 0
}

/* What goes with a transaction, whichever way it ends. */
inline end_transaction()
{
	ME.st = FREE; ME.op = 0; ME.waits = 0; ME.lvl = 0;
	ME.w1 = 0; ME.w1tok = 0; ME.w1claimant = 0;
	ME.w2 = 0; ME.w2tok = 0; ME.w2claimant = 0;
	ME.c1 = 0; ME.c2 = 0; ME.f1 = 0; ME.f2 = 0;
	ME.e1 = 0; ME.e2 = 0; ME.doomed = 0; ME.late = 0;
	forget_seen();
#if MUTATION == ABORT_KEEPS_LOCK
	if
	:: lock == me + 1 && next == COMMITTED -> lock = 0
	:: else
	fi;
#else
	if
	:: lock == me + 1 -> lock = 0
	:: else
	fi;
#endif
	wake()
}

inline rollback()
{
	printf("client %d: ROLLBACK\n", me);
	if
	:: ME.tok >= 2 -> forget_token()
	:: else
	fi
}

/* ROLLBACK TO SAVEPOINT, or an error in it that is trapped. */
inline rollback_child()
{
	printf("client %d: ROLLBACK TO SAVEPOINT\n", me);
	ME.st = FREE; ME.op = 0; ME.waits = 0; ME.lvl = 1;
	forget_seen();
	ME.w2 = 0; ME.w2tok = 0; ME.w2claimant = 0; ME.e2 = 0; ME.f2 = 0;
	ME.late = 0;
#if MUTATION == CLAIM_SURVIVES
	if
	:: ME.c2 == OPEN && !ME.c1 -> ME.c1 = OPEN; if :: lock == me + 1 -> lock = 0 :: else fi
	:: else
	fi;
#endif
	ME.c2 = 0;
	if
	:: ME.c1 -> ME.c1 = OPEN
	:: else
	fi;
	if
	:: ME.tok == 3 -> forget_token()
	:: else
	fi;
	unlock();
	wake()
}

/* RELEASE SAVEPOINT: locks, rows, effects and claims are the parent's now. */
inline commit_child()
{
	printf("client %d: RELEASE SAVEPOINT\n", me);
	if
	:: ME.c1 == INSIDE -> ME.c1 = 0
	:: ME.c1 == FREED -> ME.c1 = 0; ME.f1 = 1
	:: else
	fi;
	if
	:: ME.c2 -> ME.c1 = OPEN; ME.c2 = 0
	:: else
	fi;
	if
	:: ME.w2 ->
		ME.w1 = ME.w2; ME.w1tok = ME.w2tok; ME.w1claimant = ME.w2claimant;
		ME.w2 = 0; ME.w2tok = 0; ME.w2claimant = 0
	:: else
	fi;
	if
	:: ME.f2 -> ME.f1 = 1; ME.f2 = 0
	:: else
	fi;
	if
	:: ME.e2 -> ME.e1 = 1; ME.e2 = 0
	:: else
	fi;
	if
	:: ME.tok == 3 -> ME.tok = 2
	:: else
	fi;
	ME.lvl = 1;
	unlock()
}

/* COMMIT: what is promised is checked here. */
inline commit()
{
	if
#if MUTATION != TRAPPED_COMMITS
	:: ME.doomed -> next = ROLLBACK
#endif
#if MUTATION != REPEAT_COMMITS
	:: ME.late && ME.e1 -> next = ROLLBACK			/* ID002: its work would be a repetition */
#endif
#if MUTATION != UNSETTLED_COMMITS
	:: ME.c1 == OPEN -> next = ROLLBACK
#endif
	:: else ->
		PROMISE(!(ME.w1 && SETTLED(ck) && !cpast), "broken: a settled answer does not change inside its retention\n");
		PROMISE(!(ME.e1 && ME.tok == 1 && !(ctok & MYSELF)), "broken: a fenced holder does not commit\n");
		/* the same claimant is the same holder; nobody can be robbed of what nobody knows */
		PROMISE(!(ME.w1 && ck == P && !cpast && (ctok & ~(ME.w1tok | MYSELF)) && !(ctok & MYSELF) && !(NAMED && cclaimant)), "broken: a running lease is its holder's alone\n");
		effects = effects + ME.e1;
		PROMISE(effects <= 1, "broken: never two effects\n");
		if
		:: ME.w1 == DEL -> ck = 0; ctok = 0; cclaimant = 0; cpast = 0
		:: ME.w1 && ME.w1 != DEL -> ck = ME.w1; ctok = ME.w1tok; cclaimant = ME.w1claimant; cpast = 0
		:: else
		fi;
		PROMISE(effects == (ck == S && !cpast -> 1 : 0), "broken: an effect is there if and only if the key has succeeded\n");
		printf("client %d: COMMIT, effects: %d\n", me, effects);
		if
		:: SETTLED(ME.w1) || ME.w1 == E || ME.late -> forget_token()
		:: ME.tok >= 2 && !(SETTLED(ME.w1) || ME.w1 == E || ME.late) -> ME.tok = 1
		:: else
		fi;
		next = COMMITTED
	fi
}

/* A client that has nothing to commit goes. */
inline statement_done()
{
	ME.st = FREE; ME.op = 0;
	forget_seen();
	unlock();
	if
	:: EMPTY(me) -> next = ROLLBACK
	:: else
	fi
}

/* Writes the row of the key, in the current subtransaction. */
inline write(kind, whose, name)
{
	printf("client %d: writes %c (level %d)\n", me, LETTER(kind), ME.lvl);
	if
	:: ME.lvl == 2 -> ME.w2 = kind; ME.w2tok = whose; ME.w2claimant = name
	:: else -> ME.w1 = kind; ME.w1tok = whose; ME.w1claimant = name
	fi
}

inline write_effect()
{
	if
	:: EFFECT(me)
	:: !EFFECT(me) && ME.lvl == 2 -> ME.e2 = 1
	:: !EFFECT(me) -> ME.e1 = 1		/* in a savepoint: it was written before that */
	fi
}

/* ---- probing ---- */

inline see_own_or_committed()
{
	if
	:: ME.w2 -> ME.seen = (ME.w2 == DEL -> 0 : ME.w2); ME.seentok = ME.w2tok; ME.seenpast = 0
	:: !ME.w2 && ME.w1 -> ME.seen = (ME.w1 == DEL -> 0 : ME.w1); ME.seentok = ME.w1tok; ME.seenpast = 0
	:: else -> ME.seen = ck; ME.seentok = ctok; ME.seenpast = cpast
	fi
}

/* Another's row is busy; but a settled one that speaks is true, for a claim, whoever is at it. */
inline probe_result()
{
	forget_seen();
	if
	:: BUSY(OTHER1(me), SETTLED) && !(ME.op == CLAIM && SETTLED(ck) && !cpast) -> ME.busy = OTHER1(me) + 1
	:: BUSY(OTHER2(me), SETTLED) && !(ME.op == CLAIM && SETTLED(ck) && !cpast) -> ME.busy = OTHER2(me) + 1
	:: else ->
		see_own_or_committed();
		if
		:: SETTLED(ME.seen) && (ME.op == TOKEN || !ME.seenpast)
		:: else -> forget_seen()
		fi
	fi
}

inline probe_inflight()
{
	if
	:: BUSY(OTHER1(me), INFLIGHT) -> ME.busy = OTHER1(me) + 1
	:: BUSY(OTHER2(me), INFLIGHT) -> ME.busy = OTHER2(me) + 1
	:: else ->
		see_own_or_committed();
		if
		:: INFLIGHT(ME.seen)
		:: else -> forget_seen()
		fi
	fi
}

/* ---- deciding ---- */

#define SPEAKS			(SETTLED(ME.seen))
#define CLAIMANT		(NAMED && cclaimant && !WROTE(me))
#if MUTATION == EARLY_TAKEOVER
#define RUNNING			false
#else
#define RUNNING			(ME.seen == P && !ME.seenpast)
#endif
#define IN_DOUBT		(ME.seen == U || (ME.seen == P && ME.seenpast == DOUBT))

/* Another is writing the row: wait for it, without the lock. */
inline wait_for_writer()
{
	ME.waits = ME.busy - 1;
	forget_seen();
#if MUTATION == PROBE_BEFORE_LOCK
	if
	:: !c[ME.waits].lvl -> next = DONE		/* it has ended meanwhile: the client asks again */
	:: else
	fi;
#else
	PROMISE(c[ME.waits].lvl > 0, "broken: nobody waits for a transaction that has ended\n");
#endif
	printf("client %d: waits for the transaction of client %d\n", me, ME.waits);
	ME.st = WAITING; ME.op = 0;
	if
	:: EMPTY(me) -> ME.lvl = 1
	:: else
	fi;
#if MUTATION != WAIT_WITH_LOCK
	unlock()
#endif
}

inline claim_for_transaction()
{
	printf("client %d: claims for this transaction (level %d)\n", me, ME.lvl);
	if
	:: ME.lvl == 2 -> ME.c2 = OPEN
	:: else -> ME.c1 = OPEN
	fi;
	ME.st = FREE; ME.op = 0;
	forget_token();
	forget_seen()
}

inline claim_lease()
{
	printf("client %d: claims under a lease (level %d)\n", me, ME.lvl);
	forget_token();
	ME.tok = ME.lvl + 1;
	if
	:: RUNNING -> ME.seentok = ME.seentok | MYSELF		/* the claimant's own lease keeps its token */
	:: else -> ME.seentok = MYSELF
	fi;
	write(P, ME.seentok, NAMED);
	next = DONE
}

inline decide_claim()
{
	if
	:: ME.busy -> next = WAIT
	:: !ME.busy && (SPEAKS || IN_DOUBT || (RUNNING && !CLAIMANT)) ->
#if MUTATION != PROBE_BEFORE_LOCK		/* whose answer was true a moment ago: that is not what it is about */
		PROMISE(SETTLED(ck) || WROTE(me) || ck == U || (ck == P && cpast != OVER), "broken: what nobody holds can be claimed\n");
#endif
		printf("client %d: claims: replayed, in progress or unknown\n", me);
		next = DONE
	:: !ME.busy && !SPEAKS && !IN_DOUBT && !RUNNING -> claim_for_transaction()
	:: !ME.busy && !SPEAKS && !IN_DOUBT && (!RUNNING || CLAIMANT) ->
#if MUTATION == UNLOCK_BEFORE_ROW
		ME.st = WRITING;
		unlock()
#else
		claim_lease()
#endif
	fi
}

/* In a savepoint: the effect may have been written before that, and the error be trapped. */
inline lease_lost()
{
	printf("client %d: ID001 or ID002, and doomed\n", me);
	ME.doomed = true;
	if
	:: ME.lvl == 2 && ME.tok == 1 && !WROTE(me) -> ME.e1 = 1
	:: true
	fi;
	next = ERROR
}

/* complete (with the effect), fail, release, extend, unknown */
inline decide_token()
{
	if
	:: ME.busy -> next = WAIT
#if MUTATION == OLD_TOKEN
	:: !ME.busy && !ME.seen -> next = LOST
#else
	:: !ME.busy && (!ME.seen || !(ME.seentok & MYSELF)) -> next = LOST
#endif
	:: !ME.busy && ME.seen && (ME.seentok & MYSELF || MUTATION == OLD_TOKEN) ->
		if
		:: INFLIGHT(ME.seen) -> write_effect(); write(S, ME.seentok, 0); next = DONE
		:: INFLIGHT(ME.seen) && !EFFECT(me) -> write(F, ME.seentok, 0); next = DONE
		:: INFLIGHT(ME.seen) && !EFFECT(me) -> write(E, 0, 0); next = DONE
		:: INFLIGHT(ME.seen) && !EFFECT(me) && ME.seen != U -> write(P, ME.seentok, NAMED); next = DONE
		:: INFLIGHT(ME.seen) && !EFFECT(me) -> write(U, ME.seentok, 0); next = DONE
		/* settled with this token: the same verdict is no news, the other one dooms (ID002) */
		:: ME.seen == S || ME.seen == SO -> write_effect(); ME.late = 1; next = DONE
		:: ME.seen == F || ME.seen == FO -> next = DONE
		:: SETTLED(ME.seen) -> next = LOST
		:: SETTLED(ME.seen) -> next = ERROR
		fi
	fi
}

inline decide_resolve()
{
	if
	:: ME.busy -> next = WAIT
	:: !ME.busy && !IN_DOUBT && (MUTATION != RESOLVE_SETTLED || !ME.seen) -> next = ERROR
	:: !ME.busy && (IN_DOUBT || (MUTATION == RESOLVE_SETTLED && ME.seen)) ->
		if
		:: true -> write(E, ME.seentok, 0)
		:: true -> write(SO, ME.seentok, 0)
		:: true -> write(FO, ME.seentok, 0)
		fi;
		next = DONE
	fi
}

inline decide()
{
	if
	:: ME.op == CLAIM -> decide_claim()
	:: ME.op == TOKEN -> decide_token()
	:: ME.op == RESOLVE -> decide_resolve()
	fi
}

/* ---- a client ---- */

inline choose_call()
{
	if
	:: MAY_CLAIM -> ME.op = CLAIM
	:: MAY_SETTLE -> ME.op = TOKEN
	:: EMPTY(me) -> ME.op = RESOLVE
	fi;
	if
	:: EMPTY(me) && ME.op != RESOLVE -> ME.lvl = 2		/* in a savepoint */
	:: true
	fi
}

#if MUTATION == PROBE_BEFORE_LOCK
inline look()
{
	probe_result();
	if
	:: !ME.busy && !ME.seen -> probe_inflight()
	:: else
	fi
}
#endif

/* Settles the transaction's own claim; the lock is held since the claim. */
inline settle_claim(kind)
{
	write(kind, 0, 0);
	if
	:: ME.c2 == OPEN -> ME.c2 = 0
	:: ME.c2 != OPEN && ME.lvl == 1 -> ME.c1 = 0
	:: ME.c2 != OPEN && ME.lvl == 2 -> ME.c1 = INSIDE
	fi;
#if MUTATION == LOCK_NOT_KEPT
	if
	:: lock == me + 1 -> lock = 0
	:: else
	fi;
#else
	unlock()
#endif
}

inline release_claim()
{
	printf("client %d: releases its claim\n", me);
	if
	:: ME.c2 == OPEN -> ME.c2 = 0; ME.f2 = 1
	:: ME.c2 != OPEN && ME.lvl == 1 -> ME.c1 = 0; ME.f1 = 1
	:: ME.c2 != OPEN && ME.lvl == 2 -> ME.c1 = FREED
	fi
}

/* What a sweep makes of the committed row. */
inline sweep()
{
	printf("client %d: sweeps\n", me);
	ME.lvl = 1;
	if
	:: SETTLED(ck) && cpast -> ME.w1 = DEL
	:: ck == P && cpast == OVER -> ME.w1 = E; ME.w1tok = ctok
	:: ck == P && cpast == DOUBT -> ME.w1 = U; ME.w1tok = ctok
	:: ck == E || (ck == P && cpast == OVER) -> ME.w1 = DEL
	fi
}

inline carry_on()
{
	if :: next == DECIDE -> next = 0; decide() :: else fi;
	if :: next == LOST -> lease_lost() :: else fi;
	d_step {
	if :: next == WAIT -> wait_for_writer() :: else fi;
	/* an error: the savepoint is rolled back, or the transaction if there is none */
	if :: next == ERROR -> next = (ME.lvl == 2 -> UNDO : ROLLBACK) :: else fi;
	if :: next == DONE -> statement_done() :: else fi;
	if :: next == COMMIT -> commit() :: else fi;
	if :: next == KEEP -> commit_child() :: else fi;
	if :: next == UNDO -> rollback_child(); if :: EMPTY(me) -> next = ROLLBACK :: else fi :: else fi;
	if :: next == ROLLBACK -> rollback() :: else fi;
	if :: next == ROLLBACK || next == COMMITTED -> end_transaction() :: else fi;
	check_waits();
	next = 0
	}
}

proctype client(byte me)
{
	byte next;

end:
	do
	:: atomic {
		if
		/* A call that wants the lock, alone or in a transaction. What it asks, and
		   what the client did before (its effect, a savepoint), is left open until
		   the lock is there, since nobody else can tell. */
		:: ME.st == FREE && (!ME.lvl || MAY_CLAIM || MAY_SETTLE) ->
			if :: ME.lvl :: !ME.lvl -> ME.lvl = 1 fi;
			ME.st = LOCKING;
#if MUTATION == PROBE_BEFORE_LOCK
			choose_call();
			look()
#endif
		/* The lock and the first probe are one step: whatever another does between
		   them it could have done before, for it is nothing that needs the lock. */
		:: ME.st == LOCKING && (lock == 0 || lock == me + 1) ->
			lock = me + 1;
#if MUTATION == PROBE_BEFORE_LOCK
			next = DECIDE
#else
			choose_call();
			d_step {
				probe_result();
				if
				:: ME.busy || ME.seen -> next = DECIDE
				:: else -> ME.st = PROBING
				fi
			}
#endif
		/* The second probe, the decision, the row and the lock's return are one:
		   nobody has an uncommitted row then, and nobody else writes one. */
		:: ME.st == PROBING -> d_step { probe_inflight(); next = DECIDE }
#if MUTATION == UNLOCK_BEFORE_ROW
		:: ME.st == WRITING -> claim_lease()
#endif

		/* what the holder of a transaction-scoped claim does */
		:: IN_TRANSACTION && HAS_CLAIM(me) && !ME.doomed && !EFFECT(me) ->
			if
			:: if :: ME.lvl == 2 -> ME.e2 = 1 :: else -> ME.e1 = 1 fi;
				if
				:: settle_claim(S)
				:: true -> printf("client %d: writes its effect and forgets to settle\n", me)
				fi
			:: settle_claim(F)
			:: !WROTE(me) -> release_claim()
			fi

		/* savepoints, and the end */
		:: IN_TRANSACTION && ME.lvl == 1 && !ME.doomed && (HAS_CLAIM(me) || ME.f1 || ME.w1 == P) ->
			printf("client %d: SAVEPOINT\n", me);
			ME.lvl = 2
		:: IN_TRANSACTION && ME.lvl == 2 -> next = KEEP
		:: IN_TRANSACTION && ME.lvl == 2 -> next = UNDO
		:: IN_TRANSACTION && ME.lvl == 1 && (!ME.e1 || ME.w1 == S || ME.late || ME.doomed || ME.c1 == OPEN) ->
			next = COMMIT
		/* ... by ROLLBACK, a timeout, a cancelled statement, a crash, at any point */
		:: ME.lvl -> next = ROLLBACK
		/* ... and a client that does not know, or dies, forgets its token */
		:: IDLE && ME.tok -> printf("client %d: forgets its token\n", me); forget_token()

		/* a sweep, which waits for nothing */
#if MUTATION == SWEEP_IGNORES_LOCK
		:: IDLE && (ck == E || cpast) -> sweep()
#else
		:: IDLE && (ck == E || cpast) && !lock && !OTHERS_WROTE -> sweep()
#endif
		fi;
		carry_on()
	   }
	od
}

proctype clock()
{
end:
	do
	:: atomic { ck == P && !cpast ->
		printf("time: the lease is over\n"); if :: cpast = OVER :: cpast = DOUBT fi }
	:: atomic { SETTLED(ck) && !cpast ->
		printf("time: the retention is over\n"); cpast = OVER; effects = 0 }
	od
}

init
{
	atomic {
		run client(0);
		run client(1);
#if N == 3
		run client(2);
#endif
		run clock()
	}
}
