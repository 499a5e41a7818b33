// SPDX-License-Identifier: Apache-2.0
#include "kallsyms.h"

#include <errno.h>
#include <string.h>

#define LONGEST 512 /* KSYM_NAME_LEN */
#define TOKENS 256

/*
 * Find symbols by name. A name is kept as its length (one byte, or two when the first has its top bit set) and that many
 * tokens, each of which stands for a string; the first character of all is the symbol's type. index[i] becomes the
 * number of the first symbol that is called wanted[i], -1 where there is none. Returns 0, or -EBADMSG for a table that
 * is not of this form.
 */
int rr_kallsyms_find(const uint8_t *names, size_t names_size, const char *tokens, size_t tokens_size,
		     const uint16_t *token_index, uint32_t symbols, const char *const *wanted, size_t nr_wanted,
		     int64_t *index)
{
	size_t at = 0, missing = nr_wanted, i;
	uint32_t symbol;

	for (i = 0; i < nr_wanted; i++)
		index[i] = -1;
	for (i = 0; i < TOKENS; i++)
		if (token_index[i] >= tokens_size || !memchr(tokens + token_index[i], 0, tokens_size - token_index[i]))
			return -EBADMSG;
	for (symbol = 0; symbol < symbols && missing; symbol++) {
		char name[LONGEST];
		size_t length, used = 0, end;

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
		for (end = at + length; at < end; at++) {
			const char *token = tokens + token_index[names[at]];
			size_t size = strlen(token);

			if (size >= LONGEST - used)
				return -EBADMSG;
			memcpy(name + used, token, size);
			used += size;
		}
		name[used] = '\0';
		if (used < 2)
			continue;
		for (i = 0; i < nr_wanted; i++) {
			if (index[i] < 0 && !strcmp(name + 1, wanted[i])) {
				index[i] = symbol;
				missing--;
			}
		}
	}
	return 0;
}
