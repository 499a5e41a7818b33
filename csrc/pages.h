/* Bulk reads of pagemap, kpagecount, kpageflags and struct page, and run-length encoding of what they gave. */
#ifndef RR_PAGES_H
#define RR_PAGES_H

#include <stddef.h>
#include <stdint.h>

/* A stretch of kernel virtual memory in /proc/kcore, from its ELF program headers. */
struct rr_segment {
	uint64_t address;
	uint64_t length;
	uint64_t offset;
};

/* One present section of SPARSEMEM: its number and where struct page 0 would lie if its memmap began at PFN 0. */
struct rr_section {
	uint64_t number;
	uint64_t coded_map;
};

/* Where struct page keeps what we read. Offsets in bytes; -1 where this kernel has no such member. */
struct rr_page_layout {
	uint32_t page_struct_size;
	uint32_t section_shift;
	int32_t flags;
	int32_t refcount;
	int32_t mapcount;
	int32_t compound;
	int32_t pincount;
	int32_t large_mapcount;
	int32_t nr_pages;
	int32_t head_bit;
	int32_t compound_may_be_mask;
};

/* What a page table entry holds. */
enum rr_page_state {
	RR_PAGE_ABSENT,
	RR_PAGE_PRESENT,
	RR_PAGE_SWAPPED,
	RR_PAGE_ZERO,
	RR_PAGE_SPECIAL,
};

/* Ranges of PFNs, sorted and apart from each other, and what each is: a code of its place, its node. */
struct rr_places {
	const uint64_t *start;
	const uint64_t *end;
	const uint8_t *code;
	const int32_t *node;
	size_t count;
};

/* Masks of /proc/kpageflags entries. */
struct rr_kpageflags {
	uint64_t zero;
	uint64_t nopage;
	uint64_t reserved;
	uint64_t whole; /* of a huge page, by size */
	uint64_t part; /* head and tail */
	uint64_t hugetlb;
	uint64_t swapcache;
	uint64_t has_private;
};

/* One item a page in each; -1: not known. `state` is taken and given. */
struct rr_counts {
	uint8_t *state;
	uint8_t *is_large;
	uint8_t *unmapped; /* 1: no map count is known here */
	int64_t *refcount;
	int64_t *mapcount;
	int64_t *pincount;
	int64_t *baseline;
};

struct rr_run {
	int64_t index;
	int64_t count;
	int64_t value;
};

int rr_read_entries(int fd, uint64_t first, size_t count, uint64_t *out);
size_t rr_reads(const uint64_t *index, size_t count, uint64_t absent);
int rr_read_entries_at(int fd, const uint64_t *index, size_t count, uint64_t absent, uint64_t *out);
int64_t rr_runs(const int64_t *value, size_t count, int64_t step, struct rr_run *out, size_t room);
int rr_kcore_gather(int fd, const struct rr_segment *segments, size_t nr_segments, const uint64_t *address,
		    size_t count, size_t width, uint8_t *out, uint8_t *ok);
size_t rr_decode_pagemap(const uint64_t *entry, size_t count, uint64_t *pfn, uint8_t *state, uint8_t *file,
			 uint8_t *exclusive);
void rr_locate(const uint64_t *pfn, size_t count, const struct rr_places *places, uint8_t absent, uint8_t unknown,
	       uint8_t *place, int32_t *node);
void rr_flag_pages(const uint64_t *pfn, const uint64_t *flags, size_t count, const struct rr_kpageflags *bits,
		   uint8_t unknown, uint8_t *place, uint8_t *state, uint8_t *is_large);
int rr_read_counts(int fd, const struct rr_segment *segments, size_t nr_segments, const struct rr_section *sections,
		   size_t nr_sections, const struct rr_page_layout *layout, const uint64_t *pfn, const int64_t *order,
		   const uint64_t *flags, const uint8_t *file, size_t count, const struct rr_kpageflags *bits, int entire_only,
		   const struct rr_counts *out, size_t *missing);

#endif
