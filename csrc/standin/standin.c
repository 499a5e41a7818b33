/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for the CUDA runtime and driver libraries, for machines without a
 * GPU. It has the entry points that regrepro calls, and does to host memory
 * what matters for registration: it pins it, without FOLL_LONGTERM as NVIDIA's
 * os_lock_user_pages() did before it asked for it, or with it.
 *
 * It is no model of a GPU. Device memory is a sealed memfd, so that udmabuf can
 * export it where the kernel has udmabuf; nothing computes on it.
 *
 * What it is stays visible: regrepro_standin_name() is how the C core tells it
 * from NVIDIA's library, and there is no way to hide it.
 *
 * State is global here, unlike everywhere else in regrepro, because the CUDA
 * runtime that it stands for is global to a process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/udmabuf.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../pin.h"

#define EXPORT __attribute__((visibility("default")))

/* driver_types.h of the CUDA toolkit: enum cudaError; cuda.h has the same values where it has the same errors. */
enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	MEMORY_ALLOCATION = 2,
	INVALID_DEVICE = 101,
	OPERATING_SYSTEM = 304,
	ALREADY_REGISTERED = 712,
	NOT_REGISTERED = 713,
	NOT_SUPPORTED = 801,
};

enum { TYPE_UNREGISTERED, TYPE_HOST, TYPE_DEVICE };

#define HOST_ALLOC_KNOWN_FLAGS 0x7u
#define HOST_REGISTER_KNOWN_FLAGS 0xfu
#define HANDLE_DMA_BUF_FD 1

struct range {
	struct range *next;
	uintptr_t address;
	size_t length;
	int type;
	int allocated;		/* cudaHostAlloc: ours to unmap; cudaHostRegister: the caller's */
	int memfd;		/* device memory, else -1 */
	struct rr_pin *pin;	/* host memory */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static int contract_longterm;
static __thread int last_errno;

EXPORT const char *regrepro_standin_name(void)
{
	return "regrepro CUDA stand-in";
}

EXPORT int regrepro_standin_contract(int longterm)
{
	pthread_mutex_lock(&lock);
	contract_longterm = !!longterm;
	pthread_mutex_unlock(&lock);
	return 0;
}

/* errno of the system call behind the last failure in this thread. */
EXPORT int regrepro_standin_errno(void)
{
	return last_errno;
}

static struct range *find(uintptr_t address, int type)
{
	for (struct range *r = ranges; r; r = r->next)
		if (r->type == type && address >= r->address && address - r->address < r->length)
			return r;
	return NULL;
}

static int overlaps(uintptr_t address, size_t length)
{
	for (struct range *r = ranges; r; r = r->next)
		if (address < r->address + r->length && r->address < address + length)
			return 1;
	return 0;
}

/* Take a range that begins at an address out of the list, for its owner to free; NULL where there is none. */
static struct range *take_out(void *begin, int type, int allocated)
{
	struct range *found = NULL;

	pthread_mutex_lock(&lock);
	for (struct range **link = &ranges; *link; link = &(*link)->next)
		if ((*link)->type == type && (*link)->allocated == allocated && (*link)->address == (uintptr_t)begin) {
			found = *link;
			*link = found->next;
			break;
		}
	pthread_mutex_unlock(&lock);
	return found;
}

static int failed(int error, int cuda_error)
{
	last_errno = error;
	return cuda_error;
}

EXPORT int regrepro_standin_alive(void *host)
{
	struct range *r;
	int alive = 0;

	pthread_mutex_lock(&lock);
	r = find((uintptr_t)host, TYPE_HOST);
	if (r && r->pin)
		alive = rr_pin_alive(r->pin);
	pthread_mutex_unlock(&lock);
	return alive;
}

static const struct error {
	int number;
	const char *name, *text, *driver_name;
} errors[] = {
	{ SUCCESS, "cudaSuccess", "no error (stand-in)", "CUDA_SUCCESS" },
	{ INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument (stand-in)", "CUDA_ERROR_INVALID_VALUE" },
	{ MEMORY_ALLOCATION, "cudaErrorMemoryAllocation", "out of memory (stand-in)", "CUDA_ERROR_OUT_OF_MEMORY" },
	{ INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal (stand-in)", NULL },
	{ OPERATING_SYSTEM, "cudaErrorOperatingSystem", "the kernel refused the pin (stand-in)",
	  "CUDA_ERROR_OPERATING_SYSTEM" },
	{ ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered",
	  "part of the memory is already registered (stand-in)", NULL },
	{ NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered", "the memory is not registered (stand-in)", NULL },
	{ NOT_SUPPORTED, "cudaErrorNotSupported", "not supported by this kernel or by the stand-in (stand-in)",
	  "CUDA_ERROR_NOT_SUPPORTED" },
};
static const struct error unrecognized = { 0, "unrecognized error code", "unrecognized error code (stand-in)", NULL };

static const struct error *error_of(int number)
{
	for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
		if (errors[i].number == number)
			return &errors[i];
	return &unrecognized;
}

EXPORT const char *cudaGetErrorName(int error)
{
	return error_of(error)->name;
}

EXPORT const char *cudaGetErrorString(int error)
{
	return error_of(error)->text;
}

EXPORT int cuGetErrorName(int error, const char **name)
{
	*name = error_of(error)->driver_name;
	return *name ? SUCCESS : INVALID_VALUE;
}

/* 0.0: no version of CUDA, so that nobody takes the number for one. */
EXPORT int cudaRuntimeGetVersion(int *version)
{
	*version = 0;
	return SUCCESS;
}

EXPORT int cudaDriverGetVersion(int *version)
{
	*version = 0;
	return SUCCESS;
}

EXPORT int cudaGetDeviceCount(int *count)
{
	*count = 1;
	return SUCCESS;
}

EXPORT int cudaSetDevice(int device)
{
	return device ? INVALID_DEVICE : SUCCESS;
}

/* Caller holds the lock. Takes over nothing on failure. */
static int pin_range(uintptr_t address, size_t length, int allocated)
{
	struct range *r = calloc(1, sizeof(*r));
	const char *step = NULL;
	int error;

	if (!r)
		return failed(ENOMEM, MEMORY_ALLOCATION);
	error = contract_longterm ? rr_pin_io_uring(address, length, &r->pin, &step) :
				    rr_pin_process_vm(address, length, &r->pin, &step);
	if (error) {
		free(r);
		return failed(-error, OPERATING_SYSTEM);
	}
	r->address = address;
	r->length = length;
	r->type = TYPE_HOST;
	r->allocated = allocated;
	r->memfd = -1;
	r->next = ranges;
	ranges = r;
	return SUCCESS;
}

static int release_host(void *host, int allocated)
{
	struct range *r = take_out(host, TYPE_HOST, allocated);

	if (!r)
		return failed(EINVAL, allocated ? INVALID_VALUE : NOT_REGISTERED);
	rr_pin_destroy(r->pin);
	if (allocated)
		munmap((void *)r->address, r->length);
	free(r);
	return SUCCESS;
}

EXPORT int cudaHostAlloc(void **host, size_t length, unsigned int flags)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *address;
	int error;

	*host = NULL;
	if (!length || length > SIZE_MAX - page || (flags & ~HOST_ALLOC_KNOWN_FLAGS))
		return failed(EINVAL, INVALID_VALUE);
	length = (length + page - 1) / page * page;
	address = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (address == MAP_FAILED)
		return failed(errno, MEMORY_ALLOCATION);
	pthread_mutex_lock(&lock);
	error = pin_range((uintptr_t)address, length, 1);
	pthread_mutex_unlock(&lock);
	if (error) {
		munmap(address, length);
		return error;
	}
	*host = address;
	return SUCCESS;
}

EXPORT int cudaFreeHost(void *host)
{
	return host ? release_host(host, 1) : SUCCESS;
}

EXPORT int cudaHostRegister(void *host, size_t length, unsigned int flags)
{
	uintptr_t address = (uintptr_t)host;
	int error;

	if (!host || !length || length > UINTPTR_MAX - address || (flags & ~HOST_REGISTER_KNOWN_FLAGS))
		return failed(EINVAL, INVALID_VALUE);
	pthread_mutex_lock(&lock);
	error = overlaps(address, length) ? failed(EEXIST, ALREADY_REGISTERED) : pin_range(address, length, 0);
	pthread_mutex_unlock(&lock);
	return error;
}

EXPORT int cudaHostUnregister(void *host)
{
	return release_host(host, 0);
}

EXPORT int cudaHostGetDevicePointer(void **device, void *host, unsigned int flags)
{
	struct range *r;

	*device = NULL;
	pthread_mutex_lock(&lock);
	r = flags ? NULL : find((uintptr_t)host, TYPE_HOST);
	pthread_mutex_unlock(&lock);
	if (!r)
		return failed(EINVAL, INVALID_VALUE);
	*device = host;		/* unified addressing: the same address on both sides */
	return SUCCESS;
}

struct attributes {
	int type;
	int device;
	void *device_pointer;
	void *host_pointer;
};

EXPORT int cudaPointerGetAttributes(struct attributes *attributes, const void *address)
{
	uintptr_t value = (uintptr_t)address;
	int host, device;

	pthread_mutex_lock(&lock);
	host = find(value, TYPE_HOST) != NULL;
	device = find(value, TYPE_DEVICE) != NULL;
	pthread_mutex_unlock(&lock);
	attributes->type = host ? TYPE_HOST : device ? TYPE_DEVICE : TYPE_UNREGISTERED;
	attributes->device = host || device ? 0 : -2;	/* cudaInvalidDeviceId */
	attributes->device_pointer = host || device ? (void *)value : NULL;
	attributes->host_pointer = host ? (void *)value : NULL;
	return SUCCESS;
}

EXPORT int cudaMalloc(void **device, size_t length)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	struct range *r;
	void *address;

	*device = NULL;
	if (!length || length > SIZE_MAX - page)
		return failed(EINVAL, INVALID_VALUE);
	length = (length + page - 1) / page * page;
	r = calloc(1, sizeof(*r));
	if (!r)
		return failed(ENOMEM, MEMORY_ALLOCATION);
	r->memfd = memfd_create("regrepro-standin-device", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (r->memfd < 0)
		goto fail;
	if (ftruncate(r->memfd, (off_t)length) || fcntl(r->memfd, F_ADD_SEALS, F_SEAL_SHRINK))
		goto fail;
	address = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, r->memfd, 0);
	if (address == MAP_FAILED)
		goto fail;
	r->address = (uintptr_t)address;
	r->length = length;
	r->type = TYPE_DEVICE;
	pthread_mutex_lock(&lock);
	r->next = ranges;
	ranges = r;
	pthread_mutex_unlock(&lock);
	*device = address;
	return SUCCESS;
fail:
	last_errno = errno;
	if (r->memfd >= 0)
		close(r->memfd);
	free(r);
	return MEMORY_ALLOCATION;
}

EXPORT int cudaFree(void *device)
{
	struct range *r;

	if (!device)
		return SUCCESS;
	r = take_out(device, TYPE_DEVICE, 0);
	if (!r)
		return failed(EINVAL, INVALID_VALUE);
	munmap((void *)r->address, r->length);
	close(r->memfd);
	free(r);
	return SUCCESS;
}

/* A dma-buf over the memfd behind the range, by udmabuf (drivers/dma-buf/udmabuf.c, Linux 4.20). */
EXPORT int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t length, int type, uint64_t flags)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	struct udmabuf_create create = { .flags = UDMABUF_FLAGS_CLOEXEC };
	struct range *r;
	int device, fd;

	if (type != HANDLE_DMA_BUF_FD || flags || !length || address % page || length % page)
		return failed(EINVAL, INVALID_VALUE);
	pthread_mutex_lock(&lock);
	r = find(address, TYPE_DEVICE);
	if (!r || length > r->length - (address - r->address)) {
		pthread_mutex_unlock(&lock);
		return failed(EINVAL, INVALID_VALUE);
	}
	create.memfd = (uint32_t)r->memfd;
	create.offset = address - r->address;
	create.size = length;
	device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	if (device < 0) {
		last_errno = errno;
		pthread_mutex_unlock(&lock);
		return NOT_SUPPORTED;
	}
	fd = ioctl(device, UDMABUF_CREATE, &create);
	last_errno = fd < 0 ? errno : 0;
	close(device);
	pthread_mutex_unlock(&lock);
	if (fd < 0)
		return OPERATING_SYSTEM;
	*(int *)handle = fd;
	return SUCCESS;
}

EXPORT int cuInit(unsigned int flags)
{
	return flags ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
	*device = ordinal;
	return ordinal ? INVALID_DEVICE : SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int size, int device)
{
	if (device || size < 1)
		return INVALID_DEVICE;
	snprintf(name, (size_t)size, "%s", regrepro_standin_name());
	return SUCCESS;
}

#define ATTRIBUTE_DMA_BUF_SUPPORTED 124

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	if (device)
		return INVALID_DEVICE;
	*value = attribute == ATTRIBUTE_DMA_BUF_SUPPORTED && access("/dev/udmabuf", R_OK | W_OK) == 0;
	return SUCCESS;
}
