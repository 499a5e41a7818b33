/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_PIN_H
#define REGREPRO_PIN_H

#include <stddef.h>
#include <stdint.h>

/*
 * Pins of user pages that are held from user space until they are released. A pin lives on threads of its own, which
 * block every signal. `address` and `length` are in bytes and need not be aligned; every page that the range touches
 * is pinned. Every page is made present and writable first.
 *
 * The functions that take a pin return 0 when it is really held, else a negative errno; then `*step` names the step
 * that failed. They leave nothing behind when they fail.
 */
struct rr_pin;

/*
 * FOLL_PIN | FOLL_WRITE without FOLL_LONGTERM: process_vm_writev() of this process into itself, blocked in an
 * unanswered userfault on its local side (mm/process_vm_access.c). Before Linux 5.6 the same call takes a FOLL_GET.
 */
int rr_pin_process_vm(uintptr_t address, size_t length, struct rr_pin **pin, const char **step);

/* FOLL_GET: vmsplice() into a pipe that nobody reads (fs/splice.c). One page takes one slot of the pipe. */
int rr_pin_vmsplice(uintptr_t address, size_t length, struct rr_pin **pin, const char **step);

/* FOLL_PIN | FOLL_WRITE | FOLL_LONGTERM: io_uring fixed buffers. */
int rr_pin_io_uring(uintptr_t address, size_t length, struct rr_pin **pin, const char **step);

/* 1 while every page is still held by this process, as far as the kernel tells; else 0. */
int rr_pin_alive(struct rr_pin *pin);

/*
 * Let go of every page without changing a byte of them; 0 also when it was released before. -EIO: bytes of the target
 * were overwritten. In a forked child, which holds no pin, it closes the child's copies of the file descriptors.
 */
int rr_pin_release(struct rr_pin *pin);

/* Release and free. */
void rr_pin_destroy(struct rr_pin *pin);

/* Number of threads that hold the pin, and the kernel's id of one of them (0 when index is too large). */
size_t rr_pin_threads(struct rr_pin *pin);
int rr_pin_thread_id(struct rr_pin *pin, size_t index);

/* Result of one holding thread's system call after it ended: a negative errno, or bytes; 1 while it has not ended. */
int64_t rr_pin_thread_result(struct rr_pin *pin, size_t index);

#endif
