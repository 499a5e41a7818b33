/* Many needles in one pass (Wu and Manber's block shifts), for reading logs of gigabytes. */

#define _GNU_SOURCE
#include "logscan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS 65536

struct needle {
	const uint8_t *bytes;
	size_t length;
	int32_t next;		/* another needle whose window ends in the same two bytes, or -1 */
};

struct rr_logscan {
	size_t window;		/* the length of the shortest needle: the window that slides over the data */
	size_t count;
	uint8_t shift[BLOCKS];	/* how far the window may slide when it ends in these two bytes */
	int32_t first[BLOCKS];	/* needles whose window ends in them */
	struct needle *needles;
	uint8_t *bytes;
};

static inline size_t block(const uint8_t *at)
{
	return (size_t)at[0] << 8 | at[1];
}

struct rr_logscan *rr_logscan_new(const uint8_t *needles, const uint8_t *lengths, size_t count)
{
	struct rr_logscan *scan;
	size_t total = 0, window = 255, i, j;

	if (count == 0 || count > INT32_MAX) {
		errno = EINVAL;
		return NULL;
	}
	for (i = 0; i < count; i++) {
		if (lengths[i] < 2) {
			errno = EINVAL;
			return NULL;
		}
		total += lengths[i];
		if (lengths[i] < window)
			window = lengths[i];
	}
	scan = malloc(sizeof(*scan));
	if (!scan)
		return NULL;
	scan->needles = calloc(count, sizeof(*scan->needles));
	scan->bytes = malloc(total);
	if (!scan->needles || !scan->bytes) {
		free(scan->needles);
		free(scan->bytes);
		free(scan);
		errno = ENOMEM;
		return NULL;
	}
	memcpy(scan->bytes, needles, total);
	scan->window = window;
	scan->count = count;
	memset(scan->shift, (int)(window - 1), sizeof(scan->shift));
	for (i = 0; i < BLOCKS; i++)
		scan->first[i] = -1;
	for (i = 0, total = 0; i < count; total += lengths[i], i++) {
		const uint8_t *bytes = scan->bytes + total;
		size_t last = block(bytes + window - 2);

		for (j = 0; j + 1 < window; j++) {
			uint8_t *shift = &scan->shift[block(bytes + j)];
			uint8_t distance = (uint8_t)(window - 2 - j);

			if (distance < *shift)
				*shift = distance;
		}
		scan->needles[i] = (struct needle){ .bytes = bytes, .length = lengths[i], .next = scan->first[last] };
		scan->first[last] = (int32_t)i;
	}
	return scan;
}

void rr_logscan_free(struct rr_logscan *scan)
{
	if (!scan)
		return;
	free(scan->needles);
	free(scan->bytes);
	free(scan);
}

size_t rr_logscan_lines(const struct rr_logscan *scan, const uint8_t *data, size_t length, size_t from, uint64_t *spans,
		     size_t capacity, size_t *next)
{
	size_t found = 0, end = from + scan->window;

	while (end <= length) {
		const uint8_t *start, *newline;
		size_t key = block(data + end - 2);
		size_t shift = scan->shift[key];
		int32_t i;

		if (shift) {
			end += shift;
			continue;
		}
		start = data + end - scan->window;
		for (i = scan->first[key]; i >= 0; i = scan->needles[i].next) {
			const struct needle *needle = &scan->needles[i];

			if (needle->length <= length - (size_t)(start - data) &&
			    !memcmp(start, needle->bytes, needle->length))
				break;
		}
		if (i < 0) {
			end++;
			continue;
		}
		if (found == capacity) {
			*next = (size_t)(start - data);
			return found;
		}
		newline = memrchr(data, '\n', (size_t)(start - data));
		spans[2 * found] = newline ? (uint64_t)(newline - data) + 1 : 0;
		newline = memchr(start, '\n', length - (size_t)(start - data));
		spans[2 * found + 1] = newline ? (uint64_t)(newline - data) : length;
		end = (size_t)spans[2 * found + 1] + scan->window;
		found++;
	}
	*next = length;
	return found;
}

size_t rr_logscan_newlines(const uint8_t *data, size_t from, size_t to)
{
	const uint8_t *at = data + from, *end = data + to;
	size_t count = 0;

	while (at < end) {
		at = memchr(at, '\n', (size_t)(end - at));
		if (!at)
			break;
		count++;
		at++;
	}
	return count;
}
