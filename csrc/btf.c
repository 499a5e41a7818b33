// SPDX-License-Identifier: Apache-2.0
#include "btf.h"

#include <errno.h>
#include <string.h>

/* Kinds of Documentation/bpf/btf.rst. The number is in bits 24..28 of the info word, vlen in bits 0..15. */
enum {
	KIND_INT = 1,
	KIND_PTR,
	KIND_ARRAY,
	KIND_STRUCT,
	KIND_UNION,
	KIND_ENUM,
	KIND_FWD,
	KIND_TYPEDEF,
	KIND_VOLATILE,
	KIND_CONST,
	KIND_RESTRICT,
	KIND_FUNC,
	KIND_FUNC_PROTO,
	KIND_VAR,
	KIND_DATASEC,
	KIND_FLOAT,
	KIND_DECL_TAG,
	KIND_TYPE_TAG,
	KIND_ENUM64,
};

#define HEADER 12 /* name_off, info, size or type */

static uint32_t word(const uint8_t *at)
{
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return value;
}

/* Bytes that follow the common header of a type, or -1 for a kind that this walk does not know. */
static int64_t trailer(uint32_t info)
{
	uint32_t vlen = info & 0xffff;

	switch ((info >> 24) & 0x1f) {
	case KIND_INT:
	case KIND_VAR:
	case KIND_DECL_TAG:
		return 4;
	case KIND_ARRAY:
		return 12;
	case KIND_STRUCT:
	case KIND_UNION:
	case KIND_DATASEC:
	case KIND_ENUM64:
		return 12 * (int64_t)vlen;
	case KIND_ENUM:
	case KIND_FUNC_PROTO:
		return 8 * (int64_t)vlen;
	case KIND_PTR:
	case KIND_FWD:
	case KIND_TYPEDEF:
	case KIND_VOLATILE:
	case KIND_CONST:
	case KIND_RESTRICT:
	case KIND_FUNC:
	case KIND_FLOAT:
	case KIND_TYPE_TAG:
		return 0;
	default:
		return -1;
	}
}

/*
 * Write the offset of each type into `offset` (entry i is type id i + 1). Returns the number of types, -ENOTSUP for an
 * unknown kind, -EBADMSG when the section ends inside a type, -ENOSPC when `room` is too small.
 */
int64_t rr_btf_index(const uint8_t *types, size_t length, uint32_t *offset, size_t room)
{
	size_t at = 0, n = 0;

	while (at < length) {
		int64_t more;

		if (length - at < HEADER)
			return -EBADMSG;
		more = trailer(word(types + at + 4));
		if (more < 0)
			return -ENOTSUP;
		if ((uint64_t)more > length - at - HEADER)
			return -EBADMSG;
		if (n == room)
			return -ENOSPC;
		offset[n++] = (uint32_t)at;
		at += HEADER + (size_t)more;
	}
	return (int64_t)n;
}
