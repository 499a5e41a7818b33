/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_PRESSURE_H
#define REGREPRO_PRESSURE_H

#include <stddef.h>
#include <stdint.h>

/* Holding memory until the kernel hands out what it otherwise keeps back. Functions return 0 or a negative errno. */

/*
 * Have this thread, and the threads that it starts from now on, allocate on one NUMA node only (MPOL_BIND). A node
 * below 0 ends it (MPOL_LOCAL, see rr_keep_from_numa_balancing()). -ENOSYS: this kernel has no CONFIG_NUMA.
 */
int rr_allocate_on_node(int node);

/*
 * Give back the pages of [address, address + pages) whose byte in `marks` is not 0; the range stays mapped. Neighbours
 * go in one call. `*dropped` counts the pages that were given back, also after an error.
 */
int rr_drop_pages(uintptr_t address, size_t pages, const uint8_t *marks, size_t *dropped);

#endif
