/*-------------------------------------------------------------------------
 *
 * lookup.c
 *		Finds a key in the primary key's b-tree: which rows the index points to.
 *
 * An index scan finds the same, and is what is used wherever this gives up.
 * But it is made for any operator class, number of columns and direction, and
 * setting it up and calling comparison functions was most of what a probe cost.
 * Here the columns are an int4 and a text that sorts by its bytes, and one
 * leaf is read.
 *
 * Pages are read as the b-tree's own searches read them, one share lock at a
 * time. A page may split after its number was read and before it is locked:
 * then the key is on it or to the right of it, and the page's high key tells.
 * A page that is being or has been deleted, a root that is not the cached one
 * any more, rows pointed to from more than one leaf, an unusual value: all of
 * that is left to the index scan. No snapshot is involved, and none of those
 * that probes use would have a serializable transaction lock anything.
 *
 * The leaf stays pinned as long as the caller follows pointers: until then no
 * vacuum can give their line pointers to other rows.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/nbtree.h"
#include "access/xact.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_opfamily.h"
#include "catalog/pg_type.h"
#include "pgstat.h"
#include "storage/bufmgr.h"
#include "utils/rel.h"

#include "idem.h"

StaticAssertDecl(BTREE_VERSION == 4, "pages of the b-tree may look different now");

/* The page that a search is at, share-locked. */
typedef struct Position
{
	Relation	index;
	const IdemKey *key;
	Buffer		buffer;
	Page		page;
	BTPageOpaque opaque;
	bool		odd;			/* something is here that is left to the index scan */
} Position;

/* Can keys be looked up in this index here? */
bool
lookup_fits(Relation index)
{
	return index->rd_rel->relam == BTREE_AM_OID &&
		IndexRelationGetNumberOfKeyAttributes(index) == 2 &&
		index->rd_opfamily[0] == INTEGER_BTREE_FAM_OID && index->rd_opcintype[0] == INT4OID &&
		index->rd_opfamily[1] == TEXT_BTREE_FAM_OID && index->rd_opcintype[1] == TEXTOID &&
		index->rd_indcollation[1] == C_COLLATION_OID &&
		index->rd_indoption[0] == 0 && index->rd_indoption[1] == 0;
}

static void
read_page(Position *at, BlockNumber block)
{
	at->buffer = ReadBuffer(at->index, block);
	LockBuffer(at->buffer, BUFFER_LOCK_SHARE);
	at->page = BufferGetPage(at->buffer);
	if (PageIsNew(at->page) || PageGetSpecialSize(at->page) != MAXALIGN(sizeof(BTPageOpaqueData)))
		at->odd = true;			/* damaged: the index scan complains */
	else
	{
		at->opaque = BTPageGetOpaque(at->page);
		at->odd = at->odd || P_IGNORE(at->opaque);
	}
}

/*
 * The key against an item of the page: less than, equal to or greater than 0.
 * A column that was cut off from a high key or from a pointer to a lower page
 * is less than anything, and so is a pointer to a row.
 */
static int
compare(Position *at, OffsetNumber offset)
{
	IndexTuple	item = (IndexTuple) PageGetItem(at->page, PageGetItemId(at->page, offset));
	int			natts = BTreeTupleGetNAtts(item, at->index);
	const char *values = (char *) item + IndexInfoFindDataOffset(item->t_info);
	const char *key;
	const char *mine = VARDATA_ANY(at->key->value);
	int			key_len;
	int			my_len = VARSIZE_ANY_EXHDR(at->key->value);
	int32		scope_id;
	int			result;

	if (IndexTupleHasNulls(item))
		at->odd = true;
	if (natts == 0 || at->odd)
		return 1;
	scope_id = *(const int32 *) values;
	if (at->key->scope_id != scope_id)
		return at->key->scope_id < scope_id ? -1 : 1;
	if (natts == 1)
		return 1;

	key = values + sizeof(int32);
	if (VARATT_IS_EXTENDED(key) && !VARATT_IS_SHORT(key))
	{
		at->odd = true;			/* compressed */
		return 1;
	}
	key_len = VARSIZE_ANY_EXHDR(key);
	result = memcmp(mine, VARDATA_ANY(key), Min(my_len, key_len));
	if (result != 0)
		return result;
	if (my_len != key_len)
		return my_len < key_len ? -1 : 1;
	return BTreeTupleIsPivot(item) && BTreeTupleGetHeapTID(item) == NULL ? 1 : 0;
}

/* The first item of the page that is not less than the key. */
static OffsetNumber
search_page(Position *at)
{
	OffsetNumber low = P_FIRSTDATAKEY(at->opaque);
	OffsetNumber high = PageGetMaxOffsetNumber(at->page) + 1;

	if (!P_ISLEAF(at->opaque))
		low++;					/* the first one stands for anything less */
	while (low < high)
	{
		OffsetNumber middle = low + (high - low) / 2;

		if (compare(at, middle) > 0)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* Goes to a page, and on to the right while the key is beyond the page. */
static void
go_to(Position *at, BlockNumber block, uint32 level)
{
	read_page(at, block);
	at->odd = at->odd || at->opaque->btpo_level != level;
	while (!at->odd && !P_RIGHTMOST(at->opaque) && compare(at, P_HIKEY) > 0)
	{
		block = at->opaque->btpo_next;
		UnlockReleaseBuffer(at->buffer);
		read_page(at, block);
	}
}

/* Goes to the leaf that the key would be on; false: not from here. */
static bool
go_to_leaf(Position *at)
{
	const BTMetaPageData *meta;
	uint32		level;

	if (at->index->rd_amcache == NULL)
		_bt_getrootheight(at->index);
	meta = at->index->rd_amcache;
	if (meta == NULL || meta->btm_version != BTREE_VERSION)
		return false;

	/* a page that is the only one of its level leads everywhere below it */
	level = meta->btm_fastlevel;
	read_page(at, meta->btm_fastroot);
	at->odd = at->odd || at->opaque->btpo_level != level ||
		!P_LEFTMOST(at->opaque) || !P_RIGHTMOST(at->opaque);
	while (!at->odd && level > 0)
	{
		OffsetNumber offset = OffsetNumberPrev(search_page(at));
		BlockNumber child = BTreeTupleGetDownLink((IndexTuple)
												  PageGetItem(at->page, PageGetItemId(at->page, offset)));

		UnlockReleaseBuffer(at->buffer);
		go_to(at, child, --level);
	}
	if (at->odd)
		UnlockReleaseBuffer(at->buffer);
	return !at->odd;
}

/* Adds what a leaf's item points to; false: too much. */
static bool
add_pointers(IndexTuple item, IdemFound *found)
{
	bool		posting = BTreeTupleIsPosting(item);
	int			count = posting ? BTreeTupleGetNPosting(item) : 1;

	if (found->count + count > IDEM_FOUND_MAX)
		return false;
	memcpy(&found->tids[found->count], posting ? BTreeTupleGetPosting(item) : &item->t_tid,
		   count * sizeof(ItemPointerData));
	found->count += count;
	return true;
}

/*
 * Finds the pointers on the leaf, but for those known to lead to dead rows; on
 * a standby that may be known for the primary alone. False: there are others
 * elsewhere, or too many.
 */
static bool
find_pointers(Position *at, IdemFound *found)
{
	OffsetNumber last = PageGetMaxOffsetNumber(at->page);
	OffsetNumber offset;

	found->count = 0;
	for (offset = search_page(at); !at->odd && offset <= last && compare(at, offset) == 0; offset++)
	{
		ItemId		id = PageGetItemId(at->page, offset);

		if (ItemIdIsDead(id) && !TransactionStartedDuringRecovery())
			continue;
		if (!add_pointers((IndexTuple) PageGetItem(at->page, id), found))
			return false;
	}
	if (!at->odd && offset > last && !P_RIGHTMOST(at->opaque) && compare(at, P_HIKEY) == 0)
		return false;
	return !at->odd;
}

/*
 * Looks a key up in an index that lookup_fits(). False: an index scan has to
 * say. If there are pointers, the caller gives them to lookup_end() when it
 * has followed them.
 */
bool
lookup_key(Relation index, const IdemKey *key, IdemFound *found)
{
	Position	at = {.index = index, .key = key};
	bool		result;

	found->count = 0;
	if (!go_to_leaf(&at))
		return false;
	result = find_pointers(&at, found);
	if (!result || found->count == 0)
	{
		UnlockReleaseBuffer(at.buffer);
		found->count = 0;
	}
	else
	{
		LockBuffer(at.buffer, BUFFER_LOCK_UNLOCK);
		found->leaf = at.buffer;
	}
	if (result)
	{
		pgstat_count_index_scan(index);
		pgstat_count_index_tuples(index, found->count);
	}
	return result;
}

void
lookup_end(IdemFound *found)
{
	if (found->count > 0)
		ReleaseBuffer(found->leaf);
}
