// SPDX-License-Identifier: Apache-2.0
#include "pages.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ENTRY sizeof(uint64_t)
/* The largest window that one pread of a group of scattered entries covers, and how sparse a window may be. */
#define WINDOW 512
#define SPARSE 4

/* All bytes or an error: a short read at the end of the file leaves `done` below `length`. */
static int read_at(int fd, void *buffer, size_t length, uint64_t offset, size_t *done)
{
	size_t have = 0;

	while (have < length) {
		ssize_t n = pread(fd, (char *)buffer + have, length - have, (off_t)(offset + have));

		if (n < 0) {
			if (errno == EINTR)
				continue;
			return -errno;
		}
		if (!n)
			break;
		have += (size_t)n;
	}
	*done = have;
	return 0;
}

/*
 * Read `count` consecutive 8-byte entries of a pagemap or /proc/kpage* file. What lies beyond the end of the file is 0,
 * as it is for an address without a mapping. Returns 0 or a negative errno.
 */
int rr_read_entries(int fd, uint64_t first, size_t count, uint64_t *out)
{
	size_t done;
	int error = read_at(fd, out, count * ENTRY, first * ENTRY, &done);

	if (error)
		return error;
	memset((char *)out + done, 0, count * ENTRY - done);
	return 0;
}

/*
 * The length of the group that starts at `at`: entries that one read of [*low, *high] covers without reading more than
 * SPARSE entries for each that is wanted. An absent entry ends a group.
 */
static size_t group(const uint64_t *index, size_t at, size_t count, uint64_t absent, uint64_t *low, uint64_t *high)
{
	size_t n = 1;

	*low = *high = index[at];
	while (at + n < count) {
		uint64_t next = index[at + n], l = *low, h = *high;

		if (next == absent)
			break;
		if (next < l)
			l = next;
		if (next > h)
			h = next;
		if (h - l >= WINDOW || h - l >= SPARSE * (n + 1))
			break;
		*low = l;
		*high = h;
		n++;
	}
	return n;
}

/*
 * How many reads rr_read_entries_at and rr_read_counts make of these indexes in this order, a long run counted by its
 * windows: what sorting them first could save.
 */
size_t rr_reads(const uint64_t *index, size_t count, uint64_t absent)
{
	size_t at = 0, reads = 0;

	while (at < count) {
		uint64_t low, high;

		if (index[at] == absent) {
			at++;
			continue;
		}
		at += group(index, at, count, absent, &low, &high);
		reads++;
	}
	return reads;
}

/*
 * Read 8-byte entries at any indexes, in any order. Neighbours are read together. An index equal to `absent` gives 0.
 * Returns 0 or a negative errno.
 */
int rr_read_entries_at(int fd, const uint64_t *index, size_t count, uint64_t absent, uint64_t *out)
{
	uint64_t window[WINDOW];
	size_t at = 0;

	while (at < count) {
		uint64_t low, high;
		size_t n, i;
		int error;

		if (index[at] == absent) {
			out[at++] = 0;
			continue;
		}
		/* A run of consecutive entries of any length goes straight to its place. */
		for (n = 1; at + n < count && index[at + n] == index[at] + n && index[at + n] != absent; n++)
			;
		if (n > WINDOW / 8) {
			error = rr_read_entries(fd, index[at], n, out + at);
			if (error)
				return error;
			at += n;
			continue;
		}
		n = group(index, at, count, absent, &low, &high);
		error = rr_read_entries(fd, low, (size_t)(high - low + 1), window);
		if (error)
			return error;
		for (i = 0; i < n; i++)
			out[at + i] = window[index[at + i] - low];
		at += n;
	}
	return 0;
}

/*
 * Run-length encode. With `step` 0 a run is a stretch of equal values, with `step` 1 of values that each are one more
 * than the one before. Returns the number of runs, of which the first `room` are written.
 */
int64_t rr_runs(const int64_t *value, size_t count, int64_t step, struct rr_run *out, size_t room)
{
	size_t i = 0, n = 0;

	while (i < count) {
		size_t start = i++;

		while (i < count && value[i] == value[i - 1] + step)
			i++;
		if (n < room) {
			out[n].index = (int64_t)start;
			out[n].count = (int64_t)(i - start);
			out[n].value = value[start];
		}
		n++;
	}
	return (int64_t)n;
}

static const struct rr_segment *segment_of(const struct rr_segment *segments, size_t nr, uint64_t address,
					   uint64_t length)
{
	size_t i;

	for (i = 0; i < nr; i++) {
		const struct rr_segment *s = &segments[i];

		if (address >= s->address && address - s->address < s->length &&
		    length <= s->length - (address - s->address))
			return s;
	}
	return NULL;
}

/*
 * Read `width` bytes at each kernel address. ok[i] is 1 where they could be read; addresses outside every segment, which
 * the kernel itself would answer with zeroes, get 0 instead. Returns 0 or a negative errno of the file as a whole.
 */
int rr_kcore_gather(int fd, const struct rr_segment *segments, size_t nr_segments, const uint64_t *address,
		    size_t count, size_t width, uint8_t *out, uint8_t *ok)
{
	size_t i = 0;

	while (i < count) {
		const struct rr_segment *s = segment_of(segments, nr_segments, address[i], width);
		size_t n = 1, done, j;
		int error;

		if (!s) {
			memset(out + i * width, 0, width);
			ok[i++] = 0;
			continue;
		}
		/* Neighbours, as the usage structures of boot memory are, come in one read of at most 64 KiB. */
		while (i + n < count && address[i + n] == address[i] + n * width && (n + 1) * width <= 65536 &&
		       address[i + n] + width <= s->address + s->length)
			n++;
		error = read_at(fd, out + i * width, n * width, s->offset + (address[i] - s->address), &done);
		if (error && error != -EFAULT && error != -EIO)
			return error;
		if (error)
			done = 0;
		for (j = 0; j < n; j++)
			ok[i + j] = (j + 1) * width <= done;
		if (done < n * width)
			memset(out + i * width + done, 0, n * width - done);
		i += n;
	}
	return 0;
}

/* What struct page said of one PFN. The counts are those of the head page; `head` is its PFN. */
struct rr_page {
	uint64_t flags;
	uint64_t head;
	int32_t refcount;
	int32_t mapcount;
	int32_t pincount;
	int32_t large_mapcount;
	int32_t nr_pages;
	uint32_t known;
	uint32_t large;
};

struct memmap {
	int fd;
	const struct rr_segment *segments;
	size_t nr_segments;
	const struct rr_section *sections;
	size_t nr_sections;
	const struct rr_page_layout *layout;
	uint8_t *window; /* struct pages [first, first + have) */
	uint64_t first;
	size_t have;
};

/* Address of the struct page of a PFN, 0 when its section is not in the table. */
static uint64_t page_address(const struct memmap *map, uint64_t pfn)
{
	uint64_t number = pfn >> map->layout->section_shift;
	size_t low = 0, high = map->nr_sections;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (map->sections[middle].number < number)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == map->nr_sections || map->sections[low].number != number)
		return 0;
	return map->sections[low].coded_map + pfn * map->layout->page_struct_size;
}

/* Make the window cover [pfn, pfn + count), as far as the section goes. Returns how many it holds from pfn on. */
static size_t load(struct memmap *map, uint64_t pfn, size_t count)
{
	uint64_t address = page_address(map, pfn), offset;
	uint64_t section = (uint64_t)1 << map->layout->section_shift;
	uint64_t left = section - (pfn & (section - 1));
	size_t size = map->layout->page_struct_size, done;
	const struct rr_segment *s;

	map->have = 0;
	if (!address)
		return 0;
	if (count > left)
		count = (size_t)left;
	s = segment_of(map->segments, map->nr_segments, address, size);
	if (!s)
		return 0;
	if (count * size > s->length - (address - s->address))
		count = (size_t)(s->length - (address - s->address)) / size;
	offset = s->offset + (address - s->address);
	if (read_at(map->fd, map->window, count * size, offset, &done))
		return 0;
	map->first = pfn;
	map->have = done / size;
	return map->have;
}

static const uint8_t *struct_page(const struct memmap *map, uint64_t pfn)
{
	if (pfn < map->first || pfn - map->first >= map->have)
		return NULL;
	return map->window + (size_t)(pfn - map->first) * map->layout->page_struct_size;
}

static uint64_t long_at(const uint8_t *page, int32_t offset)
{
	uint64_t value;

	memcpy(&value, page + offset, sizeof(value));
	return value;
}

static int32_t int_at(const uint8_t *page, int32_t offset)
{
	int32_t value;

	memcpy(&value, page + offset, sizeof(value));
	return value;
}

/*
 * PFN of the head of the compound page that a tail page names. Bit 0 of the word says tail; the rest is a pointer to the
 * head or, on kernels where huge pages share their struct pages, the mask from the tail's address to the head's. A mask
 * is 2^64 - 2^k for a small k, and no struct page lies that close to the top of the address space.
 */
static uint64_t head_of(const struct memmap *map, uint64_t pfn, uint64_t word)
{
	uint64_t own = page_address(map, pfn), value = word & ~(uint64_t)1, distance;
	uint64_t negative = 0 - value;
	uint32_t size = map->layout->page_struct_size;

	if (map->layout->compound_may_be_mask && !(negative & (negative - 1)) && negative <= (uint64_t)1 << 36)
		distance = own & ~value;
	else
		distance = own - value;
	if (!distance || distance % size || distance / size > pfn)
		return pfn;
	return pfn - distance / size;
}

static void read_head(const struct memmap *map, const uint8_t *head, uint64_t pfn, struct rr_page *out)
{
	const struct rr_page_layout *layout = map->layout;

	out->head = pfn;
	out->flags = long_at(head, layout->flags);
	out->refcount = int_at(head, layout->refcount);
	out->large = layout->head_bit >= 0 && (out->flags >> layout->head_bit & 1);
	out->pincount = 0;
	out->large_mapcount = 0;
	out->nr_pages = 1;
	/* A head page without references is being freed or made: nothing that is mapped can be read there. */
	out->known = out->refcount > 0;
}

/* Members beyond the head's own struct page, in those that follow it; -1 where they cannot be read. */
static void read_large(struct memmap *map, struct rr_page *out)
{
	const struct rr_page_layout *layout = map->layout;
	int32_t last = layout->pincount;
	const uint8_t *head;
	size_t need;

	if (layout->large_mapcount > last)
		last = layout->large_mapcount;
	if (layout->nr_pages > last)
		last = layout->nr_pages;
	out->pincount = out->large_mapcount = out->nr_pages = -1;
	if (last < 0)
		return;
	need = (size_t)last / layout->page_struct_size + 1;
	if (out->head < map->first || out->head - map->first + need > map->have)
		if (load(map, out->head, need) < need)
			return;
	head = struct_page(map, out->head);
	if (layout->pincount >= 0)
		out->pincount = int_at(head, layout->pincount);
	if (layout->large_mapcount >= 0)
		out->large_mapcount = int_at(head, layout->large_mapcount) + 1;
	if (layout->nr_pages >= 0)
		out->nr_pages = int_at(head, layout->nr_pages);
}

/*
 * Read struct page of each PFN; PFN 0 stands for "none" and is left unknown. `mapcount` is the page's own _mapcount plus
 * one (of a large folio: only what is mapped by single page), the other counts are the head's.
 */
static void read_struct_pages(struct memmap *map, const uint64_t *pfn, size_t count, struct rr_page *out)
{
	struct rr_page large = { .known = 0 }; /* the large folio that was read last */
	size_t i = 0;

	map->have = 0;
	memset(out, 0, count * sizeof(*out));
	while (i < count) {
		uint64_t low, high;
		size_t n, j;

		if (!pfn[i]) {
			i++;
			continue;
		}
		n = group(pfn, i, count, 0, &low, &high);
		for (j = 0; j < n; j++) {
			struct rr_page *page = &out[i + j];
			uint64_t own = pfn[i + j], word;
			const uint8_t *at = struct_page(map, own);
			int32_t mapcount;

			if (!at) {
				/* The window has moved on to a head page, or this is the group's first. */
				if (load(map, low, (size_t)(high - low + 1)) <= own - low && load(map, own, 1) < 1)
					continue;
				at = struct_page(map, own);
			}
			word = long_at(at, map->layout->compound);
			mapcount = map->layout->mapcount < 0 ? 0 : int_at(at, map->layout->mapcount) + 1;
			if (word & 1) {
				uint64_t head = head_of(map, own, word);

				if (!large.known || large.head != head) {
					const uint8_t *h = struct_page(map, head);

					if (!h && load(map, head, 3) >= 1)
						h = struct_page(map, head);
					if (!h)
						continue;
					read_head(map, h, head, &large);
					if (large.large)
						read_large(map, &large);
				}
				*page = large;
			} else {
				read_head(map, at, own, page);
				if (page->large) {
					read_large(map, page);
					large = *page;
				}
			}
			page->mapcount = mapcount;
		}
		i += n;
	}
}

/* Bits of a pagemap entry (Documentation/admin-guide/mm/pagemap.rst). */
#define PM_PFN ((UINT64_C(1) << 55) - 1)
#define PM_EXCLUSIVE (UINT64_C(1) << 56)
#define PM_FILE (UINT64_C(1) << 61)
#define PM_SWAPPED (UINT64_C(1) << 62)
#define PM_PRESENT (UINT64_C(1) << 63)

/* Take pagemap entries apart. Returns how many pages are present, but their PFNs hidden from this user. */
size_t rr_decode_pagemap(const uint64_t *entry, size_t count, uint64_t *pfn, uint8_t *state, uint8_t *file,
			 uint8_t *exclusive)
{
	size_t i, hidden = 0;

	for (i = 0; i < count; i++) {
		uint64_t e = entry[i];
		int present = (e & PM_PRESENT) != 0;

		pfn[i] = present ? e & PM_PFN : 0;
		state[i] = present ? RR_PAGE_PRESENT : e & PM_SWAPPED ? RR_PAGE_SWAPPED : RR_PAGE_ABSENT;
		file[i] = (e & PM_FILE) != 0;
		exclusive[i] = (e & PM_EXCLUSIVE) != 0;
		hidden += present && !pfn[i];
	}
	return hidden;
}

/* Place and node (-1: not known) of each PFN; PFN 0 is `absent`, one outside of all ranges `unknown`. */
void rr_locate(const uint64_t *pfn, size_t count, const struct rr_places *places, uint8_t absent, uint8_t unknown,
	       uint8_t *place, int32_t *node)
{
	size_t i, at = 0;

	for (i = 0; i < count; i++) {
		uint64_t p = pfn[i];

		/* Neighbours mostly lie in one range. */
		if (places->count && (p < places->start[at] || p >= places->end[at])) {
			size_t low = 0, high = places->count;

			while (high - low > 1) {
				size_t middle = low + (high - low) / 2;

				if (places->start[middle] <= p)
					low = middle;
				else
					high = middle;
			}
			at = low;
		}
		if (places->count && p >= places->start[at] && p < places->end[at]) {
			place[i] = places->code[at];
			node[i] = places->node[at];
		} else {
			place[i] = unknown;
			node[i] = -1;
		}
		if (!p)
			place[i] = absent;
	}
}

/* What /proc/kpageflags says of each page: zero and special ones, those without a struct page, and huge pages. */
void rr_flag_pages(const uint64_t *pfn, const uint64_t *flags, size_t count, const struct rr_kpageflags *bits,
		   uint8_t unknown, uint8_t *place, uint8_t *state, uint8_t *is_large)
{
	size_t i;

	for (i = 0; i < count; i++) {
		uint64_t f = flags[i];
		int zero = pfn[i] && (f & bits->zero);

		if (zero)
			state[i] = RR_PAGE_ZERO;
		else if (pfn[i] && (f & (bits->nopage | bits->reserved)))
			state[i] = RR_PAGE_SPECIAL;
		if (pfn[i] && (f & bits->nopage))
			place[i] = unknown;
		/* A huge zero page says that it is huge, too: it is looked at as the page that it is for everybody. */
		is_large[i] = (!zero && (f & bits->whole)) || (f & bits->part);
	}
}

/*
 * References that mappings, page cache, swap cache and private data hold on a page's folio, -1 where that is not sure
 * (folio_expected_ref_count(), include/linux/mm.h).
 */
static int64_t baseline_of(const struct rr_page *page, uint64_t flags, int file, const struct rr_kpageflags *bits,
			   int entire_only)
{
	int cached = file || (flags & bits->swapcache), hugetlb = (flags & bits->hugetlb) != 0;
	int64_t private = file && (flags & bits->has_private) && !hugetlb;

	if (!page->large)
		return (int64_t)page->mapcount + cached + private;
	/* Older kernels keep no sum of a large folio's mappings, only how often one entry maps it whole. */
	if (page->large_mapcount < 0 || (entire_only && page->mapcount) || (cached && page->nr_pages < 1))
		return -1;
	/* hugetlb held one reference for a whole page up to 6.6, one for each page since (mm/filemap.c). */
	if (cached && hugetlb && page->refcount < page->nr_pages)
		return (int64_t)page->large_mapcount + 1 + private;
	return (int64_t)page->large_mapcount + (cached ? page->nr_pages : 0) + private;
}

/* What struct page tells of the page at `i`. Returns whether it is present and has no readable struct page. */
static int count_page(const struct rr_page *page, size_t i, uint64_t pfn, const uint64_t *flags, int file,
		      const struct rr_kpageflags *bits, int entire_only, const struct rr_counts *out)
{
	int present = out->state[i] == RR_PAGE_PRESENT;
	int small = page->known && !page->large && present;

	out->is_large[i] |= page->known && page->large;
	out->refcount[i] = page->known ? page->refcount : -1;
	out->pincount[i] = !page->known ? -1 : page->large ? page->pincount : 0;
	/* Of a small page the kernel's count of mappings is at hand; kpagecount says no other. */
	out->mapcount[i] = small ? page->mapcount : -1;
	out->unmapped[i] = pfn && !small;
	out->baseline[i] = flags && page->known && present ? baseline_of(page, flags[i], file, bits, entire_only) : -1;
	return pfn && !page->known;
}

/* Pages whose struct pages are held at a time: little enough to stay in a cache. */
#define AT_A_TIME 4096

/*
 * Counts out of struct page, read in an order of the PFNs if one is given. `flags` may be NULL; there is no baseline
 * then. Zero and special pages have none either: their references are of their own kind. (KPF_KSM is not asked: 6.12
 * sets it for every anonymous page, and a KSM page is referred to by its mappings only.) `missing`: how many present
 * pages have no readable struct page. Returns 0 or a negative errno.
 */
int rr_read_counts(int fd, const struct rr_segment *segments, size_t nr_segments, const struct rr_section *sections,
		   size_t nr_sections, const struct rr_page_layout *layout, const uint64_t *pfn, const int64_t *order,
		   const uint64_t *flags, const uint8_t *file, size_t count, const struct rr_kpageflags *bits,
		   int entire_only, const struct rr_counts *out, size_t *missing)
{
	struct memmap map = {
		.fd = fd, .segments = segments, .nr_segments = nr_segments, .sections = sections,
		.nr_sections = nr_sections, .layout = layout,
		.window = malloc((size_t)WINDOW * layout->page_struct_size),
	};
	struct rr_page *pages = malloc(AT_A_TIME * sizeof(*pages));
	uint64_t *wanted = malloc(AT_A_TIME * sizeof(*wanted));
	int error = map.window && pages && wanted ? 0 : -ENOMEM;
	size_t at, n, i;

	*missing = 0;
	for (at = 0; !error && at < count; at += n) {
		n = count - at < AT_A_TIME ? count - at : AT_A_TIME;
		for (i = 0; i < n; i++)
			wanted[i] = pfn[order ? (size_t)order[at + i] : at + i];
		read_struct_pages(&map, wanted, n, pages);
		for (i = 0; i < n; i++) {
			size_t where = order ? (size_t)order[at + i] : at + i;

			*missing += count_page(&pages[i], where, wanted[i], flags, file[where], bits, entire_only, out);
		}
	}
	free(wanted);
	free(pages);
	free(map.window);
	return error;
}
