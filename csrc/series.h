/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_SERIES_H
#define REGREPRO_SERIES_H

#include <stddef.h>
#include <stdint.h>
#include "verbs.h"

/*
 * Many registrations in a row, each with a line of its own in the record, written when it happened: for loops in which
 * the cost of an interpreter between two calls would be most of what is measured.
 */

/* An open record, as record/writer.py's RecordWriter lays it out. */
struct rr_record {
	int fd;		  /* record.jsonl, O_APPEND */
	int lock_fd;	  /* the writers' POSIX lock lies on it */
	uint64_t *shared; /* the cells that its writers share */
	uint64_t start_ns; /* CLOCK_MONOTONIC at `t` 0 */
};

struct rr_series {
	uintptr_t address; /* of the first range */
	size_t length;	   /* of each range */
	size_t ranges;	   /* ranges that lie one after the other from `address` on; they are taken by turns */
	unsigned int access;
	size_t first; /* number of the first registration of this call */
	size_t count; /* the series ends before this number */
	const char *labels; /* the line's keys that are the same in all, as JSON: "\"a\":1,\"b\":2" */
	struct rr_mr **kept; /* `count` cells for the MRs; NULL: each is deregistered before the next */
};

enum rr_series_where {
	RR_SERIES_DONE,
	RR_SERIES_REGISTER,   /* the registration was refused; it has no line yet */
	RR_SERIES_DEREGISTER, /* the registration has its line; taking it back failed */
	RR_SERIES_RECORD,     /* the line could not be written; the registration was taken back, if it could be */
	RR_SERIES_REPAIR,     /* another writer was killed in the middle of a line: -EAGAIN, nothing was done */
};

struct rr_series_end {
	size_t number; /* the registration at which it ended; `count` when all are done */
	int where;
	double seconds; /* of the refused registration */
	struct rr_mr *left; /* the MR that could not be taken back, or NULL; the caller's from now on */
};

/* Register by ibv_reg_mr_iova2, iova = address. Returns 0 or the negative errno that ended the series. */
int rr_register_series(struct rr_pd *pd, const struct rr_series *series, const struct rr_record *record,
		       struct rr_series_end *end);

/* Deregister `count` MRs; cells that are NULL are left out, those done are set to NULL. The first failure ends it. */
int rr_deregister_series(struct rr_pd *pd, struct rr_mr **kept, size_t count);

#endif
