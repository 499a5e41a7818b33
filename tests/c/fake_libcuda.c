// SPDX-License-Identifier: Apache-2.0
/*
 * A libcuda with one device, for tests of who is asked for its properties: NVIDIA's Python bindings open it as
 * they open the driver's own. An attribute's value is its number plus 1000; 124 is not known to it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, NOT_FOUND = 500 };

int cuInit(unsigned int flags)
{
	return flags ? INVALID_VALUE : SUCCESS;
}

int cuDriverGetVersion(int *version)
{
	*version = 12040;
	return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
	if (ordinal)
		return INVALID_DEVICE;
	*device = 0;
	return SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device)
{
	if (device)
		return INVALID_DEVICE;
	memset(name, 0, (size_t)size);
	strncpy(name, "Fake GPU", (size_t)size - 1);
	return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	*bytes = (size_t)80 << 30;
	return device ? INVALID_DEVICE : SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	*value = attribute + 1000;
	return device ? INVALID_DEVICE : attribute == 124 ? INVALID_VALUE : SUCCESS;
}

int cuGetErrorName(int error, const char **name)
{
	*name = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_INVALID_DEVICE";
	return SUCCESS;
}

/* The bindings of CUDA 12 and 13 look every other call up by this one; as the driver, it has versions of some. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
	(void)version;
	(void)flags;
	*function = NULL;
	if (!strcmp(symbol, "cuDeviceTotalMem"))
		symbol = "cuDeviceTotalMem_v2";
	if (!strcmp(symbol, "cuGetProcAddress"))
		symbol = "cuGetProcAddress_v2";
	for (const char **it = (const char *[]){ "cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetName",
						 "cuDeviceTotalMem_v2", "cuDeviceGetAttribute", "cuGetErrorName",
						 "cuGetProcAddress_v2", NULL };
	     *it; it++)
		if (!strcmp(symbol, *it))
			*function = dlsym(RTLD_DEFAULT, symbol);
	if (status)
		*status = *function ? 0 : 1;
	return *function ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
	return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
