// SPDX-License-Identifier: Apache-2.0
/*
 * Makes every call of csrc/cuda.c under the sanitizers, where no GPU is: exercise_cuda LIBRARY…
 * A stand-in's calls are made good use of; NVIDIA's have to be refused, each by a name. Prints "not ok" with the
 * line for what is wrong; exit code 0 if nothing was.
 */
#include "cuda.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int failures;

#define CHECK(condition)                                                     \
	do {                                                                 \
		if (!(condition)) {                                          \
			printf("not ok %d: %s\n", __LINE__, #condition);     \
			failures++;                                          \
		}                                                            \
	} while (0)

static void refused(struct rr_cuda *cuda, int result, const char *call)
{
	const char *name = rr_cuda_error_name(cuda, result);

	printf("# %s: %d %s\n", call, result, name ? name : "(none)");
	CHECK(result > 0);
	CHECK(name && !strncmp(name, "cudaError", 9));
	CHECK(rr_cuda_error_string(cuda, result) != NULL);
}

/* NVIDIA's runtime without a driver: every call that wants a device is refused, and none crashes. */
static void exercise_real(struct rr_cuda *cuda)
{
	struct rr_cuda_pointer pointer;
	struct rr_cuda_vmm vmm = { 0 };
	char name[8] = "x";
	uint64_t address = 1;
	int value = 0, fd = 0, error;

	/* CUDA 11's tells its version to those with a driver alone. */
	error = rr_cuda_runtime_version(cuda, &value);
	if (error)
		refused(cuda, error, "cudaRuntimeGetVersion");
	else
		CHECK(value >= 12000);
	refused(cuda, rr_cuda_device_count(cuda, &value), "cudaGetDeviceCount");
	refused(cuda, rr_cuda_set_device(cuda, 0), "cudaSetDevice");
	refused(cuda, rr_cuda_host_alloc(cuda, 4096, 2, &address), "cudaHostAlloc");
	CHECK(address == 0);
	refused(cuda, rr_cuda_host_register(cuda, 0x10000, 4096, 3), "cudaHostRegister");
	refused(cuda, rr_cuda_host_unregister(cuda, 0x10000), "cudaHostUnregister");
	refused(cuda, rr_cuda_host_device_pointer(cuda, 0x10000, &address), "cudaHostGetDevicePointer");
	refused(cuda, rr_cuda_pointer_attributes(cuda, 0x10000, &pointer), "cudaPointerGetAttributes");
	refused(cuda, rr_cuda_malloc(cuda, 4096, &address), "cudaMalloc");
	/* No driver library was opened: our own errno, not a call into nowhere. */
	CHECK(rr_cu_vmm_alloc(cuda, 0, 4096, 1, &vmm) == -ENOSYS);
	CHECK(rr_cu_vmm_free(cuda, &vmm) == -ENOSYS);
	CHECK(rr_cu_dmabuf_fd(cuda, 0x10000, 4096, 0, &fd) == -ENOSYS && fd == -1);
	CHECK(rr_cu_device_attribute(cuda, 0, 124, &value) == -ENOSYS);
	CHECK(rr_cu_device_name(cuda, 0, name, sizeof(name)) == -ENOSYS && !name[0]);
	CHECK(rr_cu_device_memory(cuda, 0, &address) == -ENOSYS && address == 0);
	CHECK(rr_cuda_stand_in_contract(cuda, 1) == -ENOSYS);
	CHECK(rr_cuda_stand_in_errno(cuda) == -ENOSYS);
}

static void exercise_host(struct rr_cuda *cuda, size_t page)
{
	struct rr_cuda_pointer pointer;
	uint64_t address = 0, device = 0;
	void *own;
	int error;

	error = rr_cuda_host_alloc(cuda, 3 * page + 1, 2, &address);
	if (error) {
		printf("# skip cudaHostAlloc: %s, errno %d\n", rr_cuda_error_name(cuda, error),
		       rr_cuda_stand_in_errno(cuda));
		return;
	}
	CHECK(rr_cuda_stand_in_alive(cuda, address) == 1);
	CHECK(rr_cuda_pointer_attributes(cuda, address, &pointer) == 0 && pointer.type == 1);
	CHECK(rr_cuda_host_device_pointer(cuda, address, &device) == 0 && device == address);
	CHECK(rr_cuda_host_register(cuda, address, page, 3) != 0);
	memset((void *)(uintptr_t)address, 1, 3 * page);
	CHECK(rr_cuda_free_host(cuda, address) == 0);
	CHECK(rr_cuda_free_host(cuda, address) != 0);
	own = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(own != MAP_FAILED);
	CHECK(rr_cuda_host_register(cuda, (uintptr_t)own, 2 * page, 3) == 0);
	CHECK(rr_cuda_host_unregister(cuda, (uintptr_t)own) == 0);
	munmap(own, 2 * page);
}

static void exercise_stand_in(struct rr_cuda *cuda)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	struct rr_cuda_pointer pointer;
	struct rr_cuda_vmm vmm;
	char name[8];
	uint64_t device = 0;
	int fd = 0;

	for (int longterm = 0; longterm < 2; longterm++) {
		CHECK(rr_cuda_stand_in_contract(cuda, longterm) == 0);
		exercise_host(cuda, page);
	}
	CHECK(rr_cuda_malloc(cuda, 5 * page, &device) == 0);
	CHECK(rr_cuda_pointer_attributes(cuda, device + page, &pointer) == 0 && pointer.type == 2);
	if (rr_cu_dmabuf_fd(cuda, device, page, 0, &fd) == 0)
		close(fd);
	CHECK(rr_cu_dmabuf_fd(cuda, device, 6 * page, 0, &fd) != 0);
	CHECK(rr_cuda_free(cuda, device) == 0);
	CHECK(rr_cuda_free(cuda, device) != 0);
	CHECK(rr_cu_vmm_alloc(cuda, 0, page, 1, &vmm) == -ENOSYS);
	CHECK(rr_cu_device_name(cuda, 0, name, sizeof(name)) == 0 && strlen(name) == sizeof(name) - 1);
	CHECK(rr_cu_device_name(cuda, 1, name, sizeof(name)) > 0);
	CHECK(rr_cu_device_name(cuda, 0, name, 0) == -EINVAL);
	/* The stand-in has no size of its own. */
	CHECK(rr_cu_device_memory(cuda, 0, &device) == -ENOSYS && device == 0);
}

int main(int argc, char **argv)
{
	char why[256] = "";

	CHECK(!rr_cuda_open("/nowhere/libcudart.so", NULL, why, sizeof(why)) && strstr(why, "/nowhere"));
	CHECK(!rr_cuda_open("/proc/self/status", NULL, why, 8) && strlen(why) < 8);
	for (int index = 1; index < argc; index++) {
		struct rr_cuda *cuda = rr_cuda_open(argv[index], NULL, why, sizeof(why));

		CHECK(cuda != NULL);
		if (!cuda)
			continue;
		if (rr_cuda_stand_in(cuda)) {
			rr_cuda_close(cuda);
			cuda = rr_cuda_open(argv[index], argv[index], why, sizeof(why));
			CHECK(cuda != NULL);
			if (!cuda)
				continue;
			exercise_stand_in(cuda);
		} else {
			exercise_real(cuda);
		}
		rr_cuda_close(cuda);
	}
	if (!failures)
		printf("# all right\n");
	return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
