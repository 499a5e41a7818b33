// SPDX-License-Identifier: Apache-2.0
#include "kallsyms.h"

#include <errno.h>
#include <string.h>

#define TOKENS 256
#define MOST 32 /* names in one search */

/*
 * Find symbols by name, at most 32. A name is kept as its length (one byte, or two when the first has its top bit set)
 * and that many tokens, each of which stands for a string; the first character of all is the symbol's type. index[i]
 * becomes the number of the first symbol that is called wanted[i], -1 where there is none. Returns 0, -EINVAL for too
 * many names, or -EBADMSG for a table that is not of this form.
 */
int rr_kallsyms_find(const uint8_t *names, size_t names_size, const char *tokens, size_t tokens_size,
		     const uint16_t *token_index, uint32_t symbols, const char *const *wanted, size_t nr_wanted,
		     int64_t *index)
{
	size_t token_length[TOKENS], wanted_length[MOST];
	size_t at = 0, i;
	uint32_t symbol, missing = 0;

	if (nr_wanted > MOST)
		return -EINVAL;
	for (i = 0; i < nr_wanted; i++) {
		index[i] = -1;
		wanted_length[i] = strlen(wanted[i]);
		missing |= (uint32_t)1 << i;
	}
	for (i = 0; i < TOKENS; i++) {
		const char *token = tokens + token_index[i], *end;

		if (token_index[i] >= tokens_size)
			return -EBADMSG;
		end = memchr(token, 0, tokens_size - token_index[i]);
		if (!end)
			return -EBADMSG;
		token_length[i] = (size_t)(end - token);
	}
	for (symbol = 0; symbol < symbols && missing; symbol++) {
		size_t length, used = 0, end;
		uint32_t alive = missing; /* the names that this symbol may still be */

		if (at >= names_size)
			return -EBADMSG;
		length = names[at++];
		if (length & 0x80) {
			if (at >= names_size)
				return -EBADMSG;
			length = (length & 0x7f) | (size_t)names[at++] << 7;
		}
		if (length > names_size - at)
			return -EBADMSG;
		for (end = at + length; at < end && alive; at++) {
			const char *token = tokens + token_index[names[at]];
			size_t size = token_length[names[at]];

			if (size && !used) { /* the type */
				token++;
				size--;
				used = 1;
			}
			for (i = 0; i < nr_wanted && size; i++) {
				if (!(alive >> i & 1))
					continue;
				if (size > wanted_length[i] - (used - 1) ||
				    memcmp(token, wanted[i] + (used - 1), size))
					alive &= ~((uint32_t)1 << i);
			}
			used += size;
		}
		at = end;
		for (i = 0; alive && i < nr_wanted; i++) {
			if ((alive >> i & 1) && used == wanted_length[i] + 1) {
				index[i] = symbol;
				missing &= ~((uint32_t)1 << i);
			}
		}
	}
	return 0;
}
