/* Search in the kernel's own compressed symbol table (kernel/kallsyms.c, scripts/kallsyms.c). */
#ifndef RR_KALLSYMS_H
#define RR_KALLSYMS_H

#include <stddef.h>
#include <stdint.h>

int rr_kallsyms_find(const uint8_t *names, size_t names_size, const char *tokens, size_t tokens_size,
		     const uint16_t *token_index, uint32_t symbols, const char *const *wanted, size_t nr_wanted,
		     int64_t *index);

#endif
