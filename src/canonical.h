/*-------------------------------------------------------------------------
 *
 * canonical.h
 *		What fingerprint.c, canonical.c and number.c share: parsed JSON Pointers,
 *		and the canonical form itself.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CANONICAL_H
#define IDEM_CANONICAL_H

#include "idem.h"

/*
 * Include and exclude pointers are one tree of their reference tokens, so that
 * a document is matched against all of them in one descent.
 */
typedef struct IdemPointerNode
{
	const char *name;			/* the token as the inside of a canonical JSON string */
	int			name_len;
	int32		index;			/* array element it names; -1: none */
	bool		any_element;	/* the token is an asterisk */
	bool		include;		/* an include pointer ends here */
	bool		exclude;		/* an exclude pointer ends here */
	int			first_child;	/* index of a node; 0: none */
	int			next_sibling;
} IdemPointerNode;

struct IdemPointers
{
	bool		has_include;
	int			nnodes;
	IdemPointerNode nodes[FLEXIBLE_ARRAY_MEMBER];	/* the first is the root */
};

/* deepest nesting of a document, whatever stack the server has */
#define CANONICAL_MAX_DEPTH		10000

/* ---- canonical.c ---- */

extern void canonical_digest(Datum document, IdemDocumentType type,
							 const IdemPointers *pointers, IdemDigest *digest);
extern text *canonical_text(Datum document, IdemDocumentType type, bool strict);
extern Size canonical_escaped_size(const char *src, int len);
extern void canonical_escape(char *dst, const char *src, int len);

/* ---- number.c ---- */

extern bool number_is_canonical(const char *token, int len);
extern int	number_write(char *dst, const char *token, int len);
extern bool number_survives_double(const char *token, int len);

/* room that number_write() may need: zeros up to 1e21, a sign, a carry */
#define NUMBER_SIZE(len)		((Size) (len) + 32)

#endif							/* IDEM_CANONICAL_H */
