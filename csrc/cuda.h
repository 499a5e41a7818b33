/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_CUDA_H
#define REGREPRO_CUDA_H
#include <stddef.h>
#include <stdint.h>

/*
 * The CUDA runtime and driver, opened at run time. Nothing here needs a CUDA
 * header to build: the entry points are C functions whose signatures have not
 * changed from 11.7 to 13.x.
 *
 * Every call returns 0, a positive CUDA error (of the runtime for rr_cuda_*,
 * of the driver for rr_cu_*), or a negative errno of our own: -ENOSYS when the
 * opened library has no such entry point.
 */
struct rr_cuda;

struct rr_cuda_pointer {
	int type;		/* enum cudaMemoryType: 0 unregistered, 1 host, 2 device, 3 managed */
	int device;
	uint64_t device_pointer;
	uint64_t host_pointer;
};

struct rr_cuda_vmm {
	uint64_t address;	/* device address of the mapping */
	uint64_t length;	/* rounded up to the allocation granularity */
	uint64_t handle;	/* CUmemGenericAllocationHandle */
	int gpudirect_rdma;	/* the allocation was made with gpuDirectRDMACapable */
};

/* Either path may be NULL: no driver library, then rr_cu_* say -ENOSYS. */
struct rr_cuda *rr_cuda_open(const char *runtime_path, const char *driver_path, char *why, size_t why_size);
void rr_cuda_close(struct rr_cuda *cuda);

/* Name of the software that stands in for CUDA, or NULL when the library is NVIDIA's. */
const char *rr_cuda_stand_in(struct rr_cuda *cuda);
/* Chooses what a stand-in's pins promise: 0 no FOLL_LONGTERM, 1 FOLL_LONGTERM. -ENOSYS on the real library. */
int rr_cuda_stand_in_contract(struct rr_cuda *cuda, int longterm);
/* Is the stand-in's pin of this host range held at this moment: 1, 0, or a negative errno. */
int rr_cuda_stand_in_alive(struct rr_cuda *cuda, uint64_t address);
/* errno behind the stand-in's last failure in this thread; -ENOSYS on the real library, which does not tell. */
int rr_cuda_stand_in_errno(struct rr_cuda *cuda);

const char *rr_cuda_error_name(struct rr_cuda *cuda, int error);
const char *rr_cuda_error_string(struct rr_cuda *cuda, int error);
const char *rr_cu_error_name(struct rr_cuda *cuda, int error);

int rr_cuda_runtime_version(struct rr_cuda *cuda, int *version);
int rr_cuda_driver_version(struct rr_cuda *cuda, int *version);
int rr_cuda_device_count(struct rr_cuda *cuda, int *count);
int rr_cuda_set_device(struct rr_cuda *cuda, int device);

int rr_cuda_host_alloc(struct rr_cuda *cuda, size_t length, unsigned int flags, uint64_t *address);
int rr_cuda_free_host(struct rr_cuda *cuda, uint64_t address);
int rr_cuda_host_register(struct rr_cuda *cuda, uint64_t address, size_t length, unsigned int flags);
int rr_cuda_host_unregister(struct rr_cuda *cuda, uint64_t address);
int rr_cuda_host_device_pointer(struct rr_cuda *cuda, uint64_t address, uint64_t *device_pointer);
int rr_cuda_pointer_attributes(struct rr_cuda *cuda, uint64_t address, struct rr_cuda_pointer *out);
int rr_cuda_malloc(struct rr_cuda *cuda, size_t length, uint64_t *address);
int rr_cuda_free(struct rr_cuda *cuda, uint64_t address);

int rr_cu_vmm_alloc(struct rr_cuda *cuda, int device, size_t length, int gpudirect_rdma, struct rr_cuda_vmm *out);
int rr_cu_vmm_free(struct rr_cuda *cuda, const struct rr_cuda_vmm *vmm);
/* A dma-buf file descriptor over a page-aligned device range. */
int rr_cu_dmabuf_fd(struct rr_cuda *cuda, uint64_t address, size_t length, uint64_t flags, int *fd);
/* The device's name, cut to what fits; always ends with a 0. */
int rr_cu_device_name(struct rr_cuda *cuda, int device, char *name, size_t size);
/* Bytes of memory on the device. */
int rr_cu_device_memory(struct rr_cuda *cuda, int device, uint64_t *bytes);
int rr_cu_device_attribute(struct rr_cuda *cuda, int device, int attribute, int *value);
#endif
