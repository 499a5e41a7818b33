/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CUDA by dlopen. The libraries are looked up by the Python side (core/cuda.py),
 * which knows the places of wheels and toolkits; here they are opened, and
 * each entry point that a library lacks becomes -ENOSYS of that call alone.
 */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

/* cuda.h of the CUDA toolkit: CUmemAllocationProp and friends, unchanged since 10.2. */
struct cu_location {
	int type;
	int id;
};

struct cu_allocation_prop {
	int type;
	int requested_handle_types;
	struct cu_location location;
	void *win32_handle_metadata;
	struct {
		unsigned char compression_type;
		unsigned char gpudirect_rdma_capable;
		unsigned short usage;
		unsigned char reserved[4];
	} alloc_flags;
};

struct cu_access {
	struct cu_location location;
	int flags;
};

#define CU_ALLOCATION_PINNED 1
#define CU_LOCATION_DEVICE 1
#define CU_ACCESS_READWRITE 3
#define CU_RANGE_HANDLE_DMA_BUF_FD 1

/* cudaPointerAttributes grew a reserved tail in CUDA 13: leave it room. */
union pointer_attributes {
	struct {
		int type;
		int device;
		void *device_pointer;
		void *host_pointer;
	} known;
	char room[256];
};

/* Every entry point that is looked up: its symbol, what it returns, its name here, what it takes. */
#define RUNTIME_ENTRIES(ENTRY) \
	ENTRY("regrepro_standin_name", const char *, stand_in_name, (void)) \
	ENTRY("regrepro_standin_contract", int, stand_in_contract, (int longterm)) \
	ENTRY("regrepro_standin_alive", int, stand_in_alive, (void *host)) \
	ENTRY("regrepro_standin_errno", int, stand_in_errno, (void)) \
	ENTRY("cudaGetErrorName", const char *, get_error_name, (int error)) \
	ENTRY("cudaGetErrorString", const char *, get_error_string, (int error)) \
	ENTRY("cudaRuntimeGetVersion", int, runtime_get_version, (int *version)) \
	ENTRY("cudaDriverGetVersion", int, driver_get_version, (int *version)) \
	ENTRY("cudaGetDeviceCount", int, get_device_count, (int *count)) \
	ENTRY("cudaSetDevice", int, set_device, (int device)) \
	ENTRY("cudaHostAlloc", int, host_alloc, (void **host, size_t length, unsigned int flags)) \
	ENTRY("cudaFreeHost", int, free_host, (void *host)) \
	ENTRY("cudaHostRegister", int, host_register, (void *host, size_t length, unsigned int flags)) \
	ENTRY("cudaHostUnregister", int, host_unregister, (void *host)) \
	ENTRY("cudaHostGetDevicePointer", int, host_get_device_pointer, \
	      (void **device, void *host, unsigned int flags)) \
	ENTRY("cudaPointerGetAttributes", int, pointer_get_attributes, \
	      (union pointer_attributes *attributes, const void *address)) \
	ENTRY("cudaMalloc", int, malloc_device, (void **device, size_t length)) \
	ENTRY("cudaFree", int, free_device, (void *device))

#define DRIVER_ENTRIES(ENTRY) \
	ENTRY("cuInit", int, cu_init, (unsigned int flags)) \
	ENTRY("cuGetErrorName", int, cu_get_error_name, (int error, const char **name)) \
	ENTRY("cuDeviceGet", int, cu_device_get, (int *device, int ordinal)) \
	ENTRY("cuDeviceGetAttribute", int, cu_device_get_attribute, (int *value, int attribute, int device)) \
	ENTRY("cuDeviceGetName", int, cu_device_get_name, (char *name, int size, int device)) \
	ENTRY("cuDeviceTotalMem_v2", int, cu_device_total_mem, (size_t *bytes, int device)) \
	ENTRY("cuMemGetAllocationGranularity", int, cu_mem_get_allocation_granularity, \
	      (size_t *granularity, const struct cu_allocation_prop *prop, int option)) \
	ENTRY("cuMemCreate", int, cu_mem_create, \
	      (uint64_t *handle, size_t length, const struct cu_allocation_prop *prop, uint64_t flags)) \
	ENTRY("cuMemRelease", int, cu_mem_release, (uint64_t handle)) \
	ENTRY("cuMemAddressReserve", int, cu_mem_address_reserve, \
	      (uint64_t *address, size_t length, size_t alignment, uint64_t hint, uint64_t flags)) \
	ENTRY("cuMemAddressFree", int, cu_mem_address_free, (uint64_t address, size_t length)) \
	ENTRY("cuMemMap", int, cu_mem_map, \
	      (uint64_t address, size_t length, size_t offset, uint64_t handle, uint64_t flags)) \
	ENTRY("cuMemUnmap", int, cu_mem_unmap, (uint64_t address, size_t length)) \
	ENTRY("cuMemSetAccess", int, cu_mem_set_access, \
	      (uint64_t address, size_t length, const struct cu_access *access, size_t count)) \
	ENTRY("cuMemGetHandleForAddressRange", int, cu_mem_get_handle_for_address_range, \
	      (void *handle, uint64_t address, size_t length, int type, uint64_t flags))

#define MEMBER(symbol, returns, member, parameters) returns (*member) parameters;
#define OFFSET(symbol, returns, member, parameters) { symbol, offsetof(struct rr_cuda, member) },

struct rr_cuda {
	void *runtime;
	void *driver;
	RUNTIME_ENTRIES(MEMBER)
	DRIVER_ENTRIES(MEMBER)
};

struct entry_point {
	const char *name;
	size_t offset;
};

static const struct entry_point runtime_entries[] = { RUNTIME_ENTRIES(OFFSET) };
static const struct entry_point driver_entries[] = { DRIVER_ENTRIES(OFFSET) };

static void look_up(struct rr_cuda *cuda, void *library, const struct entry_point *entries, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		void *symbol = dlsym(library, entries[i].name);

		/* POSIX lets a function pointer travel through void *; memcpy keeps -Wpedantic quiet. */
		memcpy((char *)cuda + entries[i].offset, &symbol, sizeof(symbol));
	}
}

struct rr_cuda *rr_cuda_open(const char *runtime_path, const char *driver_path, char *why, size_t why_size)
{
	struct rr_cuda *cuda = calloc(1, sizeof(*cuda));

	if (!cuda) {
		snprintf(why, why_size, "%s", strerror(ENOMEM));
		errno = ENOMEM;
		return NULL;
	}
	if (runtime_path) {
		cuda->runtime = dlopen(runtime_path, RTLD_NOW | RTLD_LOCAL);
		if (!cuda->runtime)
			goto fail;
		look_up(cuda, cuda->runtime, runtime_entries, sizeof(runtime_entries) / sizeof(runtime_entries[0]));
	}
	if (driver_path) {
		cuda->driver = dlopen(driver_path, RTLD_NOW | RTLD_LOCAL);
		if (!cuda->driver)
			goto fail;
		look_up(cuda, cuda->driver, driver_entries, sizeof(driver_entries) / sizeof(driver_entries[0]));
	}
	return cuda;
fail:
	snprintf(why, why_size, "%s", dlerror());
	rr_cuda_close(cuda);
	errno = ENOENT;
	return NULL;
}

/*
 * NVIDIA's libraries start threads and register exit handlers: unloading them
 * under a live context crashes at exit, so only a library that was never used
 * (or the stand-in) may be closed. The loader counts references, so keeping
 * ours costs nothing.
 */
void rr_cuda_close(struct rr_cuda *cuda)
{
	if (!cuda)
		return;
	if (cuda->stand_in_name) {
		if (cuda->driver)
			dlclose(cuda->driver);
		if (cuda->runtime)
			dlclose(cuda->runtime);
	}
	free(cuda);
}

const char *rr_cuda_stand_in(struct rr_cuda *cuda)
{
	return cuda->stand_in_name ? cuda->stand_in_name() : NULL;
}

const char *rr_cuda_error_name(struct rr_cuda *cuda, int error)
{
	return cuda->get_error_name ? cuda->get_error_name(error) : NULL;
}

const char *rr_cuda_error_string(struct rr_cuda *cuda, int error)
{
	return cuda->get_error_string ? cuda->get_error_string(error) : NULL;
}

const char *rr_cu_error_name(struct rr_cuda *cuda, int error)
{
	const char *name = NULL;

	if (!cuda->cu_get_error_name || cuda->cu_get_error_name(error, &name))
		return NULL;
	return name;
}

/* A call that takes and gives what CUDA's does. */
#define FORWARD(function, member, parameters, arguments) \
	int function parameters \
	{ \
		return cuda->member ? cuda->member arguments : -ENOSYS; \
	}

FORWARD(rr_cuda_stand_in_contract, stand_in_contract, (struct rr_cuda *cuda, int longterm), (longterm))
FORWARD(rr_cuda_stand_in_alive, stand_in_alive,
	(struct rr_cuda *cuda, uint64_t address), ((void *)(uintptr_t)address))
FORWARD(rr_cuda_stand_in_errno, stand_in_errno, (struct rr_cuda *cuda), ())
FORWARD(rr_cuda_runtime_version, runtime_get_version, (struct rr_cuda *cuda, int *version), (version))
FORWARD(rr_cuda_driver_version, driver_get_version, (struct rr_cuda *cuda, int *version), (version))
FORWARD(rr_cuda_device_count, get_device_count, (struct rr_cuda *cuda, int *count), (count))
FORWARD(rr_cuda_set_device, set_device, (struct rr_cuda *cuda, int device), (device))
FORWARD(rr_cuda_free_host, free_host, (struct rr_cuda *cuda, uint64_t address), ((void *)(uintptr_t)address))
FORWARD(rr_cuda_host_register, host_register,
	(struct rr_cuda *cuda, uint64_t address, size_t length, unsigned int flags),
	((void *)(uintptr_t)address, length, flags))
FORWARD(rr_cuda_host_unregister, host_unregister,
	(struct rr_cuda *cuda, uint64_t address), ((void *)(uintptr_t)address))
FORWARD(rr_cuda_free, free_device, (struct rr_cuda *cuda, uint64_t address), ((void *)(uintptr_t)address))

int rr_cuda_host_alloc(struct rr_cuda *cuda, size_t length, unsigned int flags, uint64_t *address)
{
	void *host = NULL;
	int error = cuda->host_alloc ? cuda->host_alloc(&host, length, flags) : -ENOSYS;

	*address = (uintptr_t)host;
	return error;
}

int rr_cuda_host_device_pointer(struct rr_cuda *cuda, uint64_t address, uint64_t *device_pointer)
{
	void *host = (void *)(uintptr_t)address, *device = NULL;
	int error = cuda->host_get_device_pointer ? cuda->host_get_device_pointer(&device, host, 0) : -ENOSYS;

	*device_pointer = (uintptr_t)device;
	return error;
}

int rr_cuda_pointer_attributes(struct rr_cuda *cuda, uint64_t address, struct rr_cuda_pointer *out)
{
	union pointer_attributes attributes;
	int error;

	if (!cuda->pointer_get_attributes)
		return -ENOSYS;
	memset(&attributes, 0, sizeof(attributes));
	error = cuda->pointer_get_attributes(&attributes, (const void *)(uintptr_t)address);
	out->type = attributes.known.type;
	out->device = attributes.known.device;
	out->device_pointer = (uintptr_t)attributes.known.device_pointer;
	out->host_pointer = (uintptr_t)attributes.known.host_pointer;
	return error;
}

int rr_cuda_malloc(struct rr_cuda *cuda, size_t length, uint64_t *address)
{
	void *device = NULL;
	int error = cuda->malloc_device ? cuda->malloc_device(&device, length) : -ENOSYS;

	*address = (uintptr_t)device;
	return error;
}

static int vmm_complete(const struct rr_cuda *cuda)
{
	return cuda->cu_mem_get_allocation_granularity && cuda->cu_mem_create && cuda->cu_mem_release &&
	       cuda->cu_mem_address_reserve && cuda->cu_mem_address_free && cuda->cu_mem_map && cuda->cu_mem_unmap &&
	       cuda->cu_mem_set_access;
}

int rr_cu_vmm_alloc(struct rr_cuda *cuda, int device, size_t length, int gpudirect_rdma, struct rr_cuda_vmm *out)
{
	struct cu_allocation_prop prop = {
		.type = CU_ALLOCATION_PINNED,
		.location = { CU_LOCATION_DEVICE, device },
	};
	struct cu_access access = { { CU_LOCATION_DEVICE, device }, CU_ACCESS_READWRITE };
	uint64_t address = 0, handle = 0;
	size_t granularity = 0;
	int error;

	if (!vmm_complete(cuda))
		return -ENOSYS;
	prop.alloc_flags.gpudirect_rdma_capable = !!gpudirect_rdma;
	error = cuda->cu_mem_get_allocation_granularity(&granularity, &prop, 0);
	if (error)
		return error;
	if (!granularity || length > SIZE_MAX - granularity)
		return -EINVAL;
	length = (length + granularity - 1) / granularity * granularity;
	error = cuda->cu_mem_create(&handle, length, &prop, 0);
	if (error)
		return error;
	error = cuda->cu_mem_address_reserve(&address, length, 0, 0, 0);
	if (error)
		goto release;
	error = cuda->cu_mem_map(address, length, 0, handle, 0);
	if (error)
		goto free_address;
	error = cuda->cu_mem_set_access(address, length, &access, 1);
	if (error)
		goto unmap;
	out->address = address;
	out->length = length;
	out->handle = handle;
	out->gpudirect_rdma = !!gpudirect_rdma;
	return 0;
unmap:
	cuda->cu_mem_unmap(address, length);
free_address:
	cuda->cu_mem_address_free(address, length);
release:
	cuda->cu_mem_release(handle);
	return error;
}

int rr_cu_vmm_free(struct rr_cuda *cuda, const struct rr_cuda_vmm *vmm)
{
	int first = 0, error;

	if (!vmm_complete(cuda))
		return -ENOSYS;
	/* Go on after a failure, so that nothing more than the failed step is left; report the first. */
	error = cuda->cu_mem_unmap(vmm->address, vmm->length);
	first = error;
	error = cuda->cu_mem_address_free(vmm->address, vmm->length);
	first = first ? first : error;
	error = cuda->cu_mem_release(vmm->handle);
	return first ? first : error;
}

int rr_cu_dmabuf_fd(struct rr_cuda *cuda, uint64_t address, size_t length, uint64_t flags, int *fd)
{
	*fd = -1;
	if (!cuda->cu_mem_get_handle_for_address_range)
		return -ENOSYS;
	return cuda->cu_mem_get_handle_for_address_range(fd, address, length, CU_RANGE_HANDLE_DMA_BUF_FD, flags);
}

/* The driver's handle of a device. */
static int get_device(const struct rr_cuda *cuda, int device, int *handle)
{
	int error;

	if (!cuda->cu_init || !cuda->cu_device_get)
		return -ENOSYS;
	error = cuda->cu_init(0);
	return error ? error : cuda->cu_device_get(handle, device);
}

int rr_cu_device_name(struct rr_cuda *cuda, int device, char *name, size_t size)
{
	int handle = 0, error;

	if (!size || size > INT_MAX)
		return -EINVAL;
	name[0] = '\0';
	if (!cuda->cu_device_get_name)
		return -ENOSYS;
	error = get_device(cuda, device, &handle);
	if (error)
		return error;
	error = cuda->cu_device_get_name(name, (int)size, handle);
	name[size - 1] = '\0';
	return error;
}

int rr_cu_device_memory(struct rr_cuda *cuda, int device, uint64_t *bytes)
{
	size_t size = 0;
	int handle = 0, error;

	*bytes = 0;
	if (!cuda->cu_device_total_mem)
		return -ENOSYS;
	error = get_device(cuda, device, &handle);
	if (error)
		return error;
	error = cuda->cu_device_total_mem(&size, handle);
	*bytes = size;
	return error;
}

int rr_cu_device_attribute(struct rr_cuda *cuda, int device, int attribute, int *value)
{
	int handle = 0, error;

	if (!cuda->cu_device_get_attribute)
		return -ENOSYS;
	error = get_device(cuda, device, &handle);
	return error ? error : cuda->cu_device_get_attribute(value, attribute, handle);
}
