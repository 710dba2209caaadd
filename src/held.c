/*-------------------------------------------------------------------------
 *
 * held.c
 *		The lock on one key, and the claims this transaction holds.
 *
 * Who holds the key lock, and when
 * --------------------------------
 * The key lock is a transaction-level heavyweight lock on a hash of scope and
 * key. It covers the time in which no row speaks for the key: whoever decides
 * on an absence, and whoever writes a row of the key, holds it. Two keys with
 * one hash only wait for each other.
 *
 * As soon as a row speaks that was written in the subtransaction that took the
 * lock, the lock is given back: others get the lock, find the uncommitted row
 * with a dirty snapshot, and treat the key as busy until its writer has ended.
 * Lock and row vanish together if that subtransaction is rolled back, so there
 * is no moment at which neither stops the others. A transaction can therefore
 * settle any number of keys with a constant number of locks.
 *
 * If a claim and its settling are in different subtransactions, the row may be
 * rolled back while the claim stays, so the lock stays too. The claim keeps
 * both subtransaction ids; when the subtransaction that settled has been
 * committed into the claim's own, both stand or fall together, and the lock is
 * given back then.
 *
 * Cases that shaped this:
 *
 * - A zombie completes while a takeover of its lease is uncommitted. Leased:
 *   the zombie gets the lock, finds the row busy, gives the lock back, waits
 *   for the taker's transaction, and looks again: another token (lease lost)
 *   or, after a rollback, its own (accepted). Transaction-scoped: the taker
 *   has the lock to its end, so the zombie waits for that.
 * - Nobody waits for a transaction while holding the key lock: a holder that
 *   came to settle its own uncommitted claim would wait for the lock, and the
 *   lock's owner for the holder.
 * - A claim in a parent, completed in a child that rolls back: settle_subid is
 *   the child's, so the claim is unsettled again, the lock was kept throughout.
 * - A claim in a child that commits to its parent: its locks are the parent's
 *   then, and claim_subid moves up with them. One that rolls back is
 *   forgotten, the resource owner has released the lock.
 * - A sweep between two probes of a claim: cannot be, the claim has the lock
 *   and the sweep needs it.
 * - A crash anywhere: no lock survives, and only committed rows do. Locks of
 *   prepared transactions are restored by the server.
 * - PREPARE TRANSACTION commits open savepoints first, so what is settled
 *   holds no lock when it prepares, and what is not settled cannot prepare.
 *
 * The lock is taken under the resource owner of the current subtransaction,
 * not under the portal's that happens to run, so that a later statement can
 * give it back. No PG_TRY is needed for that: abort resets the owner.
 *
 * Open claims are linked twice, deepest subtransaction first: by the one that
 * claimed, and by the one that settled. Subtransactions end deepest first, so
 * what the end of one concerns is a prefix of each list, however many claims
 * are open. What is settled for good leaves the lists, so memory is bounded by
 * the claims that are open.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "storage/lmgr.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "idem.h"

/* open claims by key; lives as long as the backend, empty between transactions */
#define SH_PREFIX			claims
#define SH_ELEMENT_TYPE		ClaimsEntry
#define SH_KEY_TYPE			const IdemKey *
#define SH_KEY				key
#define SH_HASH_KEY(tb, k)	((uint32) (k)->hash)
#define SH_EQUAL(tb, a, b)	key_equal(a, b)
#define SH_SCOPE			static inline
#define SH_DECLARE
#define SH_DEFINE
typedef struct ClaimsEntry
{
	const IdemKey *key;
	IdemClaim  *claim;
	char		status;
} ClaimsEntry;
#include "lib/simplehash.h"

/* a table that grew beyond this is not kept for the next transaction */
#define CLAIMS_KEPT			1024

static claims_hash *claims = NULL;
static IdemClaim *last_claimed = NULL;
static IdemClaim *last_settled = NULL;

/* an error that this transaction must end with, whatever trapped it */
static bool doomed = false;
static int	doom_code;
static const char *doom_message;
static IdemKey doom_key;

static bool durable = false;

/*
 * The subtransaction in which a key was settled that another transaction had
 * settled with the same token already, and that key.
 */
static SubTransactionId repeated_in = InvalidSubTransactionId;
static IdemKey repeated_key;

static void held_xact_callback(XactEvent event, void *arg);
static void held_subxact_callback(SubXactEvent event, SubTransactionId subid,
								  SubTransactionId parent, void *arg);

void
held_init(void)
{
	RegisterXactCallback(held_xact_callback, NULL);
	RegisterSubXactCallback(held_subxact_callback, NULL);
}

/* ---- the lock ---- */

static void
key_lock_tag(const IdemKey *key, LOCKTAG *tag)
{
	SET_LOCKTAG_ADVISORY(*tag, MyDatabaseId, (uint32) (key->hash >> 32), (uint32) key->hash,
						 IDEM_KEY_LOCK_CLASS);
}

/*
 * Locks a key; false if another transaction has it and we shall not wait.
 * Locks nest: each call that returns true is undone by one held_unlock().
 */
bool
held_lock(const IdemKey *key, bool wait)
{
	ResourceOwner save = CurrentResourceOwner;
	LOCKTAG		tag;
	LockAcquireResult result;

	key_lock_tag(key, &tag);
	CurrentResourceOwner = CurTransactionResourceOwner;
	result = LockAcquire(&tag, ExclusiveLock, false, !wait);
	CurrentResourceOwner = save;
	return result != LOCKACQUIRE_NOT_AVAIL;
}

static void
unlock_as(const IdemKey *key, ResourceOwner owner)
{
	ResourceOwner save = CurrentResourceOwner;
	LOCKTAG		tag;

	key_lock_tag(key, &tag);
	CurrentResourceOwner = owner;
	LockRelease(&tag, ExclusiveLock, false);
	CurrentResourceOwner = save;
}

/* Has another transaction locked the key? Looks, without waiting or locking. */
bool
held_elsewhere(const IdemKey *key)
{
	LOCKTAG		tag;
	int			count;

	key_lock_tag(key, &tag);
	(void) GetLockConflicts(&tag, ExclusiveLock, &count);
	return count > 0;
}

/* Gives back a lock taken in the current subtransaction. */
void
held_unlock(const IdemKey *key)
{
	unlock_as(key, CurTransactionResourceOwner);
}

/* ---- the claims ---- */

/* The last claim on a key, also one settled in a subtransaction still open; or NULL. */
IdemClaim *
held_find(const IdemKey *key)
{
	ClaimsEntry *entry;

	if (last_claimed == NULL)
		return NULL;
	entry = claims_lookup(claims, key);
	return entry ? entry->claim : NULL;
}

static void
link_settled(IdemClaim *claim)
{
	claim->older_settled = last_settled;
	claim->newer_settled = NULL;
	if (last_settled)
		last_settled->newer_settled = claim;
	last_settled = claim;
}

static void
unlink_settled(IdemClaim *claim)
{
	if (claim->newer_settled)
		claim->newer_settled->older_settled = claim->older_settled;
	else
		last_settled = claim->older_settled;
	if (claim->older_settled)
		claim->older_settled->newer_settled = claim->newer_settled;
	claim->settled = 0;
	claim->settle_subid = InvalidSubTransactionId;
}

/*
 * Remembers a claim of the current subtransaction, which holds the key lock;
 * the caller fills in what was decided. If the key has a claim that was
 * released or settled in a subtransaction still open, the new one covers it:
 * the old one is back when the new one is rolled back or done.
 */
IdemClaim *
held_add(const IdemKey *key)
{
	Size		size = VARSIZE_ANY(key->value);
	IdemClaim  *claim;
	ClaimsEntry *entry;
	bool		found;

	if (claims == NULL)
		claims = claims_create(TopMemoryContext, 16, NULL);
	claim = MemoryContextAllocZero(TopTransactionContext, MAXALIGN(sizeof(IdemClaim)) + size);
	claim->key = *key;
	claim->key.value = (text *) ((char *) claim + MAXALIGN(sizeof(IdemClaim)));
	memcpy(claim->key.value, key->value, size);
	claim->claim_subid = GetCurrentSubTransactionId();
	claim->xid = GetTopTransactionIdIfAny();
	claim->cid = GetCurrentCommandId(false);

	entry = claims_insert(claims, &claim->key, &found);
	if (found)
		claim->covered = entry->claim;
	entry->key = &claim->key;
	entry->claim = claim;

	claim->older_claim = last_claimed;
	if (last_claimed)
		last_claimed->newer_claim = claim;
	last_claimed = claim;
	return claim;
}

/* Takes a claim out of the table; one that it covered is its key's again. */
static void
forget_key(IdemClaim *claim)
{
	ClaimsEntry *entry = claims_lookup(claims, &claim->key);

	if (entry->claim != claim)
	{
		/* what covered that one's cover was settled further in, and is gone */
		Assert(entry->claim->covered == claim);
		entry->claim->covered = claim->covered;
	}
	else if (claim->covered)
	{
		entry->claim = claim->covered;
		entry->key = &claim->covered->key;
	}
	else
		claims_delete(claims, &claim->key);
}

static void
drop_claim(IdemClaim *claim)
{
	forget_key(claim);
	if (claim->settled)
		unlink_settled(claim);
	if (claim->newer_claim)
		claim->newer_claim->older_claim = claim->older_claim;
	else
		last_claimed = claim->older_claim;
	if (claim->older_claim)
		claim->older_claim->newer_claim = claim->newer_claim;
	if (DatumGetPointer(claim->request))
		pfree(DatumGetPointer(claim->request));
	pfree(claim);
}

/*
 * The claim and what it came to are in one subtransaction: nothing is left to
 * remember. A released claim keeps its lock to the end of the transaction, so
 * that nobody executes beside work that it may still do.
 */
static void
finish_claim(IdemClaim *claim, ResourceOwner owner)
{
	if (claim->settled != IDEM_FREE)
		unlock_as(&claim->key, owner);
	drop_claim(claim);
}

/* Copies a request that is to be stored with the result; 0: none. */
void
held_keep_request(IdemClaim *claim, Datum request)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);

	if (DatumGetPointer(claim->request))
		pfree(DatumGetPointer(claim->request));
	claim->request = (Datum) 0;
	if (DatumGetPointer(request))
		claim->request = PointerGetDatum(PG_DETOAST_DATUM_COPY(request));
	MemoryContextSwitchTo(caller);
}

/* Notes that a claim was settled, or released (IDEM_FREE), by the current subtransaction. */
void
held_settle(IdemClaim *claim, char how)
{
	claim->settled = how;
	claim->settle_subid = GetCurrentSubTransactionId();
	link_settled(claim);
	if (claim->settle_subid == claim->claim_subid)
		finish_claim(claim, CurTransactionResourceOwner);
}

/* Has the transaction written nothing since it claimed? */
bool
held_untouched(const IdemClaim *claim)
{
	return claim->xid == GetTopTransactionIdIfAny() && claim->cid == GetCurrentCommandId(false);
}

/* Is a claim open in this scope? */
bool
held_in_scope(int32 scope_id)
{
	for (IdemClaim *claim = last_claimed; claim; claim = claim->older_claim)
	{
		if (claim->key.scope_id == scope_id)
			return true;
	}
	return false;
}

/* ---- what the end of the transaction must see to ---- */

static void
keep_key(IdemKey *copy, const IdemKey *key)
{
	*copy = *key;
	copy->value = MemoryContextAlloc(TopTransactionContext, VARSIZE_ANY(key->value));
	memcpy(copy->value, key->value, VARSIZE_ANY(key->value));
}

/*
 * Makes the transaction end with this error even if a savepoint or an
 * EXCEPTION block traps the one that the caller raises next.
 */
void
held_doom(int sqlerrcode, const char *message, const IdemKey *key)
{
	if (doomed)
		return;
	doom_code = sqlerrcode;
	doom_message = message;
	keep_key(&doom_key, key);
	doomed = true;
}

/*
 * Notes that a settled key is settled again. The first COMMIT's answer may have
 * been lost, so that alone is fine; but what this transaction has written, or
 * is going to, repeats what the first one wrote, so it must not commit.
 */
void
held_repeat(const IdemKey *key)
{
	if (repeated_in != InvalidSubTransactionId)
		return;
	keep_key(&repeated_key, key);
	repeated_in = GetCurrentSubTransactionId();
}

/* Raises ID001: the caller's claim is lost, and its transaction must not commit. */
void
held_lease_lost(const IdemKey *key)
{
	const char *message = "the lease on the key was lost";

	held_doom(ERRCODE_IDEM_LEASE_LOST, message, key);
	stats_add(key->scope_id, IDEM_COUNT_LEASES_LOST, 1);
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_LEASE_LOST),
			 errmsg_internal("%s", message),
			 key_errdetail(key),
			 errhint("The key was taken over, given up or settled by another holder; this transaction can only be rolled back.")));
	pg_unreachable();
}

/*
 * The commit of this transaction waits for its WAL record (and a synchronous
 * standby) whatever synchronous_commit says: the record of an intent must not
 * get lost after the outside effect it precedes.
 */
void
held_require_durable_commit(void)
{
	durable = true;
}

static void
check_end_of_transaction(void)
{
	IdemClaim  *claim;

	if (doomed)
		ereport(ERROR,
				(errcode(doom_code),
				 errmsg_internal("%s", doom_message),
				 key_errdetail(&doom_key),
				 errhint("The error was trapped, but the transaction can only be rolled back.")));

	if (repeated_in != InvalidSubTransactionId && TransactionIdIsValid(GetTopTransactionIdIfAny()))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_NOT_HELD),
				 errmsg("the key was settled by an earlier transaction with the same token"),
				 key_errdetail(&repeated_key),
				 errhint("That transaction was committed: roll back, and go on from the stored result. What this one has written would repeat its work.")));

	for (claim = last_claimed; claim; claim = claim->older_claim)
	{
		if (!claim->settled)
			ereport(ERROR,
					(errcode(ERRCODE_IDEM_UNSETTLED),
					 errmsg("transaction ends with an unsettled claim"),
					 key_errdetail(&claim->key),
					 errhint("Settle it with idem_complete() or idem_fail() in the transaction that claims it, or claim with a lease if the work outlives the transaction.")));
	}

	/*
	 * As late as this, so that neither a savepoint nor a SET of the caller's
	 * undoes it.
	 */
	if (durable && synchronous_commit < SYNCHRONOUS_COMMIT_ON)
		(void) set_config_option("synchronous_commit", "on", PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_LOCAL, true, 0, false);
}

static void
held_xact_callback(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			if (last_claimed || doomed || durable || repeated_in != InvalidSubTransactionId)
				check_end_of_transaction();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			/* the claims themselves go with TopTransactionContext */
			last_claimed = last_settled = NULL;
			doomed = durable = false;
			repeated_in = InvalidSubTransactionId;
			ledger_forget_locks();
			if (claims && claims->size > CLAIMS_KEPT)
			{
				claims_destroy(claims);
				claims = NULL;
			}
			else if (claims && claims->members > 0)
				claims_reset(claims);
			break;
		default:
			break;
	}
}

static void
held_subxact_callback(SubXactEvent event, SubTransactionId subid, SubTransactionId parent, void *arg)
{
	IdemClaim  *claim;

	if (repeated_in == subid && event == SUBXACT_EVENT_COMMIT_SUB)
		repeated_in = parent;
	else if (repeated_in == subid && event == SUBXACT_EVENT_ABORT_SUB)
		repeated_in = InvalidSubTransactionId;

	if (last_claimed == NULL)
		return;

	if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		IdemClaim  *next;

		for (claim = last_settled; claim && claim->settle_subid == subid; claim = next)
		{
			next = claim->older_settled;
			claim->settle_subid = parent;
			if (claim->claim_subid == parent)
				finish_claim(claim, ResourceOwnerGetParent(CurTransactionResourceOwner));
		}
		for (claim = last_claimed; claim && claim->claim_subid == subid; claim = claim->older_claim)
			claim->claim_subid = parent;
	}
	else if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		while (last_settled && last_settled->settle_subid == subid)
			unlink_settled(last_settled);
		while (last_claimed && last_claimed->claim_subid == subid)
			drop_claim(last_claimed);
	}
}

/*
 * Sleeps before another try, twice as long each time, 1 to 50 milliseconds;
 * *pause starts at 0.
 */
void
held_pause(int *pause)
{
	static uint32 wait_event = 0;

	if (wait_event == 0)
		wait_event = WaitEventExtensionNew("IdemClaim");
	*pause = Min(Max(*pause * 2, 1), 50);
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, *pause, wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}
