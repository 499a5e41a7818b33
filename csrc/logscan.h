#ifndef RR_LOGSCAN_H
#define RR_LOGSCAN_H

#include <stddef.h>
#include <stdint.h>

struct rr_logscan;

/*
 * Prepare a search for any of @count needles; @needles holds them one after the other, @lengths their lengths (2 to
 * 255 bytes each). Returns NULL with errno set: EINVAL for needles that cannot be searched, ENOMEM.
 */
struct rr_logscan *rr_logscan_new(const uint8_t *needles, const uint8_t *lengths, size_t count);

void rr_logscan_free(struct rr_logscan *scan);

/*
 * Find the lines of @data that hold a needle. Writes pairs (offset of the line, offset of its newline or the end) to
 * @spans, at most @capacity pairs. *@next is where to go on: @length where all was searched. Returns the number of
 * pairs.
 */
size_t rr_logscan_lines(const struct rr_logscan *scan, const uint8_t *data, size_t length, size_t from, uint64_t *spans,
		     size_t capacity, size_t *next);

/* Count the newlines in @data from @from up to @to. */
size_t rr_logscan_newlines(const uint8_t *data, size_t from, size_t to);

#endif
