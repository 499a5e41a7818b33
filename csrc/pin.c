// SPDX-License-Identifier: Apache-2.0
/* Held pins: FOLL_PIN, FOLL_GET and FOLL_LONGTERM, from user space, on a stock kernel. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pin.h"

#include "iouring.h"
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* include/uapi/linux/userfaultfd.h, since 6.1: a userfaultfd by permission of a device node. */
#define DEV_USERFAULTFD_NEW _IO(0xAA, 0x00)

/* Virtual size of a holding thread's stack; it touches a few pages of it. Room for large static TLS. */
#define STACK_SIZE ((size_t)256 << 10)

/* round_pipe_size() in fs/pipe.c knows nothing larger. */
#define PIPE_LIMIT ((size_t)1 << 31)

enum pin_type { PROCESS_VM, VMSPLICE, IO_URING };

struct holder {
	struct rr_pin *pin;
	pthread_t thread;
	uintptr_t address;
	size_t length;
	uintptr_t local;
	atomic_int thread_id;
	atomic_bool returned;
	bool arrived;
	bool started;
	int64_t result;
};

struct rr_pin {
	enum pin_type type;
	uintptr_t address;
	size_t length;
	size_t page;
	pid_t process;
	pthread_mutex_t lock;
	bool released;
	int release_result;

	struct holder *holders;
	size_t count;
	char *stacks;
	size_t stacks_length;

	/* process_vm_writev + userfaultfd */
	int userfault;
	int ended; /* eventfd: a holding thread left its system call */
	char *local; /* one page for each thread, in which it faults */
	size_t local_length;

	/* vmsplice and io_uring */
	int pipe[2];
	dev_t pipe_device;
	ino_t pipe_inode;
	size_t queued;
	int ring;
	sem_t taken;
	sem_t let_go;
	int taken_result;
	const char *step;
};

/*
 * Really every signal: the C library keeps two for itself out of every mask that goes through it, and one of them
 * (setuid() in another thread) would make the thread spin in the fault. The kernel alone refuses SIGKILL and SIGSTOP.
 */
static void block_every_signal(void)
{
	uint64_t all = ~UINT64_C(0);

	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, NULL, sizeof(all));
}

static void enter_holder(struct holder *holder)
{
	block_every_signal();
	prctl(PR_SET_NAME, "regrepro-pin", 0, 0, 0);
	atomic_store(&holder->thread_id, (int)syscall(SYS_gettid));
}

static struct rr_pin *pin_new(enum pin_type type, uintptr_t address, size_t length, size_t holders)
{
	struct rr_pin *pin = calloc(1, sizeof(*pin));
	size_t index;

	if (!pin)
		return NULL;
	pin->holders = calloc(holders, sizeof(*pin->holders));
	if (!pin->holders) {
		free(pin);
		return NULL;
	}
	pin->type = type;
	pin->address = address;
	pin->length = length;
	pin->page = (size_t)sysconf(_SC_PAGESIZE);
	pin->process = getpid();
	pin->count = holders;
	pin->userfault = pin->ended = pin->ring = pin->pipe[0] = pin->pipe[1] = -1;
	pthread_mutex_init(&pin->lock, NULL);
	sem_init(&pin->taken, 0, 0);
	sem_init(&pin->let_go, 0, 0);
	for (index = 0; index < holders; index++)
		pin->holders[index].pin = pin;
	return pin;
}

static void close_once(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void close_files(struct rr_pin *pin)
{
	close_once(&pin->userfault);
	close_once(&pin->ended);
	close_once(&pin->pipe[0]);
	close_once(&pin->pipe[1]);
	close_once(&pin->ring);
}

static void pin_free(struct rr_pin *pin)
{
	close_files(pin);
	if (pin->local)
		munmap(pin->local, pin->local_length);
	if (pin->stacks)
		munmap(pin->stacks, pin->stacks_length);
	sem_destroy(&pin->taken);
	sem_destroy(&pin->let_go);
	pthread_mutex_destroy(&pin->lock);
	free(pin->holders);
	free(pin);
}

/*
 * Memory of the pin itself. One mapping for all threads: 64 GiB of 4 KiB pages take 16,384 threads, and a mapping and
 * a guard for each would come near vm.max_map_count.
 */
static char *own_memory(size_t length)
{
	void *area = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (area == MAP_FAILED)
		return NULL;
	/* Small pages (a huge one would be shared by many stacks); both are hints. */
	madvise(area, length, MADV_NOHUGEPAGE);
	return area;
}

/* Start every holding thread with all signals blocked from its first instruction. */
static int start_holders(struct rr_pin *pin, void *(*body)(void *))
{
	pthread_attr_t attributes;
	sigset_t all, before;
	size_t stack = (STACK_SIZE + pin->page - 1) & ~(pin->page - 1);
	size_t index;
	int ret = 0;

	pin->stacks_length = pin->count * stack;
	pin->stacks = own_memory(pin->stacks_length);
	if (!pin->stacks)
		return -ENOMEM;
	ret = pthread_attr_init(&attributes);
	if (ret)
		return -ret;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	for (index = 0; index < pin->count && !ret; index++) {
		struct holder *holder = &pin->holders[index];

		ret = pthread_attr_setstack(&attributes, pin->stacks + index * stack, stack);
		if (!ret)
			ret = pthread_create(&holder->thread, &attributes, body, holder);
		holder->started = !ret;
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	return -ret;
}

static void join_holders(struct rr_pin *pin)
{
	size_t index;

	for (index = 0; index < pin->count; index++) {
		if (pin->holders[index].started)
			pthread_join(pin->holders[index].thread, NULL);
		pin->holders[index].started = false;
	}
}

/* Check a range, make its pages present, and make the pin of it; `step` is what fails. */
static int prepare(enum pin_type type, uintptr_t address, size_t length, size_t holders, struct rr_pin **pin,
		   const char **step)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	int ret;

	*pin = NULL;
	*step = "arguments";
	if (length == 0 || address > UINTPTR_MAX - length || address + length > UINTPTR_MAX - page)
		return -EINVAL;
	/* A reference for reading to a page that was never written would be one to the zero page. */
	*step = "populate";
	ret = rr_populate(address, length, 1);
	if (ret)
		return ret;
	*step = "memory for the pin";
	*pin = pin_new(type, address, length, holders);
	return *pin ? 0 : -ENOMEM;
}

/* ---- FOLL_PIN: process_vm_writev + userfaultfd ---- */

static void *hold_process_vm(void *argument)
{
	struct holder *holder = argument;
	struct rr_pin *pin = holder->pin;
	/* One byte suffices to block on, and is all that could ever be written. */
	struct iovec local = { .iov_base = (void *)holder->local, .iov_len = 1 };
	struct iovec remote = { .iov_base = (void *)holder->address, .iov_len = holder->length };
	uint64_t one = 1;
	ssize_t written;

	enter_holder(holder);
	/* By the thread's own id: the process' may name a leader that has exited and has no memory any more. */
	written = process_vm_writev((pid_t)atomic_load(&holder->thread_id), &local, 1, &remote, 1, 0);
	holder->result = written < 0 ? -errno : written;
	atomic_store(&holder->returned, true);
	while (write(pin->ended, &one, sizeof(one)) < 0 && errno == EINTR)
		;
	return NULL;
}

static int open_userfault(const char **step)
{
	struct uffdio_api api = { .api = UFFD_API };
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	int failure;

	*step = "userfaultfd";
	if (fd < 0) {
		int device;

		failure = -errno;
		device = failure == -EPERM ? open("/dev/userfaultfd", O_RDWR | O_CLOEXEC) : -1;
		if (device < 0)
			return failure;
		fd = ioctl(device, DEV_USERFAULTFD_NEW, O_CLOEXEC | O_NONBLOCK);
		close(device);
		if (fd < 0)
			return failure;
	}
	*step = "UFFDIO_API";
	if (ioctl(fd, UFFDIO_API, &api)) {
		failure = -errno;
		close(fd);
		return failure;
	}
	return fd;
}

/*
 * End the holding threads' system calls without a byte written. The order matters: first the local side loses every
 * right, then the faults are woken, so that each is tried again and fails with EFAULT. The range stays mapped (and so
 * cannot be taken by somebody else's mmap() with readable bytes in it) until the threads are gone.
 */
static int end_process_vm(struct rr_pin *pin)
{
	struct uffdio_range range = { .start = (uintptr_t)pin->local, .len = pin->local_length };
	size_t index;
	int ret = 0;

	if (mprotect(pin->local, pin->local_length, PROT_NONE) &&
	    mmap(pin->local, pin->local_length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
		 0) == MAP_FAILED) {
		munmap(pin->local, pin->local_length);
		pin->local = NULL;
	}
	ioctl(pin->userfault, UFFDIO_WAKE, &range);
	close_once(&pin->userfault);
	join_holders(pin);
	close_once(&pin->ended);
	for (index = 0; index < pin->count; index++)
		if (pin->holders[index].result > 0)
			ret = -EIO;
	return ret;
}

static size_t note_faults(struct rr_pin *pin)
{
	struct uffd_msg messages[64];
	size_t arrived = 0;
	ssize_t got, index;

	while ((got = read(pin->userfault, messages, sizeof(messages))) > 0) {
		for (index = 0; index < got / (ssize_t)sizeof(messages[0]); index++) {
			uintptr_t where = (uintptr_t)messages[index].arg.pagefault.address - (uintptr_t)pin->local;
			struct holder *holder;

			if (messages[index].event != UFFD_EVENT_PAGEFAULT || where >= pin->local_length)
				continue;
			holder = &pin->holders[where / pin->page];
			if (!holder->arrived)
				arrived++;
			holder->arrived = true;
		}
	}
	return arrived;
}

/* Wait until every thread is blocked in its fault, or one has come back without. */
static int await_faults(struct rr_pin *pin)
{
	struct pollfd watched[2] = {
		{ .fd = pin->userfault, .events = POLLIN },
		{ .fd = pin->ended, .events = POLLIN },
	};
	size_t arrived = 0;
	size_t index;

	while (arrived < pin->count) {
		if (poll(watched, 2, -1) < 0) {
			if (errno == EINTR)
				continue;
			return -errno;
		}
		arrived += note_faults(pin);
		if (!(watched[1].revents & POLLIN))
			continue;
		for (index = 0; index < pin->count; index++)
			if (atomic_load(&pin->holders[index].returned))
				return pin->holders[index].result < 0 ? (int)pin->holders[index].result : -EIO;
	}
	return 0;
}

int rr_pin_process_vm(uintptr_t address, size_t length, struct rr_pin **result, const char **step)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	/* What one pass of process_vm_rw_single_vec() pins before it copies: two pages full of page pointers. */
	size_t pages_each = 2 * page / sizeof(void *);
	struct uffdio_register registration;
	struct rr_pin *pin;
	uintptr_t first = address & ~(uintptr_t)(page - 1);
	uintptr_t last = (address + length - 1) & ~(uintptr_t)(page - 1);
	size_t threads = ((last - first) / page + pages_each) / pages_each;
	size_t index;
	int ret;

	*result = NULL;
	ret = prepare(PROCESS_VM, address, length, threads, &pin, step);
	if (ret)
		return ret;
	ret = open_userfault(step);
	if (ret < 0)
		goto fail;
	pin->userfault = ret;
	*step = "eventfd";
	pin->ended = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (pin->ended < 0) {
		ret = -errno;
		goto fail;
	}
	*step = "memory for the pin";
	pin->local_length = threads * page;
	pin->local = own_memory(pin->local_length);
	if (!pin->local) {
		ret = -ENOMEM;
		goto fail;
	}
	madvise(pin->local, pin->local_length, MADV_DONTFORK);
	memset(&registration, 0, sizeof(registration));
	registration.range.start = (uintptr_t)pin->local;
	registration.range.len = pin->local_length;
	registration.mode = UFFDIO_REGISTER_MODE_MISSING;
	*step = "UFFDIO_REGISTER";
	if (ioctl(pin->userfault, UFFDIO_REGISTER, &registration)) {
		ret = -errno;
		goto fail;
	}
	for (index = 0; index < threads; index++) {
		struct holder *holder = &pin->holders[index];
		uintptr_t start = index ? first + index * pages_each * page : address;
		uintptr_t end = index + 1 < threads ? first + (index + 1) * pages_each * page : address + length;

		holder->address = start;
		holder->length = end - start;
		holder->local = (uintptr_t)pin->local + index * page;
	}
	*step = "pthread_create";
	ret = start_holders(pin, hold_process_vm);
	if (!ret) {
		*step = "process_vm_writev";
		ret = await_faults(pin);
	}
	if (ret) {
		end_process_vm(pin);
		goto fail;
	}
	*step = NULL;
	*result = pin;
	return 0;
fail:
	pin_free(pin);
	return ret;
}

enum thread_where { IN_SYSTEM_CALL, ELSEWHERE, RUNNING, UNTOLD };

/* /proc/self/task/TID/syscall names the system call that a thread sleeps in, or says "running". */
static enum thread_where where_is_thread(int thread_id, long system_call)
{
	char path[64], text[32];
	enum thread_where where;
	ssize_t got;
	int fd;

	snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", thread_id);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT && access("/proc/self/syscall", R_OK) == 0 ? ELSEWHERE : UNTOLD;
	got = read(fd, text, sizeof(text) - 1);
	if (got <= 0) {
		where = errno == ESRCH ? ELSEWHERE : UNTOLD;
	} else {
		char *end;
		long number;

		text[got] = '\0';
		number = strtol(text, &end, 10);
		if (!strncmp(text, "running", 7))
			where = RUNNING;
		else
			where = end != text && number == system_call ? IN_SYSTEM_CALL : ELSEWHERE;
	}
	close(fd);
	return where;
}

static int process_vm_alive(struct rr_pin *pin)
{
	size_t index;

	for (index = 0; index < pin->count; index++) {
		struct holder *holder = &pin->holders[index];
		enum thread_where where = RUNNING;
		int attempt;

		/*
		 * A thread that runs is either on its way out or, after SIGSTOP or a freezer, going around in its
		 * fault: give it time to say which.
		 */
		for (attempt = 0; attempt < 100 && where == RUNNING; attempt++) {
			if (atomic_load(&holder->returned))
				return 0;
			where = where_is_thread(atomic_load(&holder->thread_id), SYS_process_vm_writev);
			if (where == RUNNING)
				sched_yield();
		}
		if (where == ELSEWHERE || atomic_load(&holder->returned))
			return 0;
	}
	return 1;
}

/* ---- FOLL_GET: vmsplice; FOLL_LONGTERM: io_uring ---- */

static int take_vmsplice(struct rr_pin *pin)
{
	uintptr_t first = pin->address & ~(uintptr_t)(pin->page - 1);
	uintptr_t last = (pin->address + pin->length - 1) & ~(uintptr_t)(pin->page - 1);
	size_t room = last - first + pin->page;
	struct stat status;
	long size;

	pin->step = "pipe2";
	if (pipe2(pin->pipe, O_CLOEXEC | O_NONBLOCK))
		return -errno;
	if (fstat(pin->pipe[0], &status))
		return -errno;
	pin->pipe_device = status.st_dev;
	pin->pipe_inode = status.st_ino;
	pin->step = "F_SETPIPE_SZ";
	if (room > PIPE_LIMIT)
		return -EINVAL;
	size = fcntl(pin->pipe[1], F_GETPIPE_SZ);
	if (size < 0)
		return -errno;
	if ((size_t)size < room && fcntl(pin->pipe[1], F_SETPIPE_SZ, room) < 0)
		return -errno;
	pin->step = "vmsplice";
	while (pin->queued < pin->length) {
		struct iovec rest = {
			.iov_base = (void *)(pin->address + pin->queued),
			.iov_len = pin->length - pin->queued,
		};
		ssize_t queued = vmsplice(pin->pipe[1], &rest, 1, SPLICE_F_NONBLOCK);

		if (queued < 0)
			return -errno;
		if (queued == 0)
			return -EIO;
		pin->queued += (size_t)queued;
	}
	return 0;
}

/* Drop the pages out of the pipe itself: a copy of its descriptors in a forked child would keep them. */
static int give_back_vmsplice(struct rr_pin *pin)
{
	int sink = open("/dev/null", O_WRONLY | O_CLOEXEC);
	char scratch[4096];
	int left = 0;
	ssize_t got;

	do {
		got = -1;
		if (sink >= 0)
			got = splice(pin->pipe[0], NULL, sink, NULL, PIPE_LIMIT - 1, SPLICE_F_NONBLOCK);
		if (got < 0)
			got = read(pin->pipe[0], scratch, sizeof(scratch));
	} while (got > 0);
	if (sink >= 0)
		close(sink);
	if (ioctl(pin->pipe[0], FIONREAD, &left))
		left = 0;
	close_once(&pin->pipe[0]);
	close_once(&pin->pipe[1]);
	return left ? -EIO : 0;
}

static int vmsplice_alive(struct rr_pin *pin)
{
	struct stat status;
	int queued = 0;

	/* FIONREAD adds up the lengths of the buffers in an unsigned int; lengths are below 2^31 here. */
	if (fstat(pin->pipe[0], &status) || status.st_dev != pin->pipe_device || status.st_ino != pin->pipe_inode)
		return 0;
	return !ioctl(pin->pipe[0], FIONREAD, &queued) && (size_t)(unsigned int)queued == pin->length;
}

static int take_io_uring(struct rr_pin *pin)
{
	int ring;

	pin->step = "io_uring_setup";
	ring = rr_ring_open();
	if (ring < 0)
		return ring;
	pin->ring = ring;
	pin->step = "IORING_REGISTER_BUFFERS";
	return rr_ring_register(ring, pin->address, pin->length);
}

static int give_back_io_uring(struct rr_pin *pin)
{
	/* Closing the ring alone would unpin later, in a kernel worker, and never while a forked child has it open. */
	int ret = rr_ring_unregister(pin->ring);

	close_once(&pin->ring);
	return ret;
}

static void *hold_file(void *argument)
{
	struct holder *holder = argument;
	struct rr_pin *pin = holder->pin;

	enter_holder(holder);
	pin->taken_result = pin->type == VMSPLICE ? take_vmsplice(pin) : take_io_uring(pin);
	sem_post(&pin->taken);
	if (!pin->taken_result) {
		while (sem_wait(&pin->let_go) && errno == EINTR)
			;
		pin->release_result = pin->type == VMSPLICE ? give_back_vmsplice(pin) : give_back_io_uring(pin);
	}
	holder->result = pin->taken_result ? pin->taken_result : pin->release_result;
	atomic_store(&holder->returned, true);
	return NULL;
}

static int pin_file(enum pin_type type, uintptr_t address, size_t length, struct rr_pin **result, const char **step)
{
	struct rr_pin *pin;
	int ret;

	*result = NULL;
	ret = prepare(type, address, length, 1, &pin, step);
	if (ret)
		return ret;
	*step = "pthread_create";
	ret = start_holders(pin, hold_file);
	if (ret) {
		pin_free(pin);
		return ret;
	}
	while (sem_wait(&pin->taken) && errno == EINTR)
		;
	ret = pin->taken_result;
	if (ret) {
		*step = pin->step;
		join_holders(pin);
		pin_free(pin);
		return ret;
	}
	*step = NULL;
	*result = pin;
	return 0;
}

int rr_pin_vmsplice(uintptr_t address, size_t length, struct rr_pin **pin, const char **step)
{
	return pin_file(VMSPLICE, address, length, pin, step);
}

int rr_pin_io_uring(uintptr_t address, size_t length, struct rr_pin **pin, const char **step)
{
	return pin_file(IO_URING, address, length, pin, step);
}

/* ---- all kinds ---- */

int rr_pin_alive(struct rr_pin *pin)
{
	int alive = 0;

	if (pin->process != getpid())
		return 0;
	pthread_mutex_lock(&pin->lock);
	if (!pin->released) {
		if (pin->type == PROCESS_VM)
			alive = process_vm_alive(pin);
		else if (pin->type == VMSPLICE)
			alive = vmsplice_alive(pin);
		else
			alive = rr_ring_registered(pin->ring) == 1;
	}
	pthread_mutex_unlock(&pin->lock);
	return alive;
}

int rr_pin_release(struct rr_pin *pin)
{
	int ret;

	if (pin->process != getpid()) {
		/* The threads and their pins are the parent's. The lock may have been held when the process forked. */
		close_files(pin);
		return 0;
	}
	pthread_mutex_lock(&pin->lock);
	if (!pin->released) {
		pin->released = true;
		if (pin->type == PROCESS_VM) {
			pin->release_result = end_process_vm(pin);
		} else {
			sem_post(&pin->let_go);
			join_holders(pin);
		}
	}
	ret = pin->release_result;
	pthread_mutex_unlock(&pin->lock);
	return ret;
}

void rr_pin_destroy(struct rr_pin *pin)
{
	if (!pin)
		return;
	rr_pin_release(pin);
	if (pin->process != getpid())
		pin->local = NULL; /* MADV_DONTFORK: not mapped in the child */
	pin_free(pin);
}

size_t rr_pin_threads(struct rr_pin *pin)
{
	return pin->count;
}

int rr_pin_thread_id(struct rr_pin *pin, size_t index)
{
	return index < pin->count ? atomic_load(&pin->holders[index].thread_id) : 0;
}

int64_t rr_pin_thread_result(struct rr_pin *pin, size_t index)
{
	if (index >= pin->count || !atomic_load(&pin->holders[index].returned))
		return 1;
	return pin->holders[index].result;
}
