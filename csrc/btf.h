/* A fast walk over BTF (Documentation/bpf/btf.rst): index types by id. */
#ifndef RR_BTF_H
#define RR_BTF_H

#include <stddef.h>
#include <stdint.h>

int64_t rr_btf_index(const uint8_t *types, size_t length, uint32_t *offset, size_t room);

#endif
