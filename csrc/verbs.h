/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_VERBS_H
#define REGREPRO_VERBS_H

#include <stddef.h>
#include <stdint.h>

/*
 * Verbs through libibverbs.so.1, opened at run time. Functions that return int return 0 or a negative errno, as
 * libibverbs left it. Nothing about a registration is checked here: length, iova and access flags go to the library,
 * and by it to the kernel, as they are.
 */
struct rr_verbs;
struct rr_device;
struct rr_pd;

/* The layout of struct ibv_mr. */
struct rr_mr {
	void *context;
	void *pd;
	void *addr;
	size_t length;
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

struct rr_device_attributes {
	char fw_ver[64];
	uint64_t node_guid; /* host byte order */
	uint64_t max_mr_size;
	uint64_t page_size_cap;
	uint32_t vendor_id;
	uint32_t vendor_part_id;
	uint32_t hw_ver;
	uint32_t device_cap_flags;
	int max_mr;
	int max_pd;
	int max_qp;
	int max_cq;
	int ports;
};

struct rr_port_attributes {
	int state;
	int max_mtu;
	int active_mtu;
	int gid_table_length;
	uint32_t max_msg_size;
	uint16_t lid;
	int link_layer;
	int physical_state;
};

/*
 * Open `path` (normally "libibverbs.so.1") and look up its functions. On failure (-ENOENT: the library cannot be
 * loaded, -ENOSYS: a function is missing) `why` holds a sentence.
 */
int rr_verbs_load(const char *path, struct rr_verbs **verbs, char *why, size_t why_size);

/* Close the library; no device of it may be open. */
void rr_verbs_unload(struct rr_verbs *verbs);

/* The devices' names, each ended by a zero byte. Returns their number, or -ERANGE when `size` is too small. */
int rr_verbs_devices(struct rr_verbs *verbs, char *names, size_t size);

/* -ENODEV: no device of this name. */
int rr_device_open(struct rr_verbs *verbs, const char *name, struct rr_device **device);
int rr_device_close(struct rr_device *device);
int rr_device_query(struct rr_device *device, struct rr_device_attributes *attributes);
int rr_port_query(struct rr_device *device, uint8_t port, struct rr_port_attributes *attributes);

int rr_pd_alloc(struct rr_device *device, struct rr_pd **pd);
int rr_pd_dealloc(struct rr_pd *pd);

/* The three registrations; the last two give -ENOSYS when the installed library does not have the function. */
int rr_reg_mr(struct rr_pd *pd, uintptr_t address, size_t length, int access, struct rr_mr **mr);
int rr_reg_mr_iova2(struct rr_pd *pd, uintptr_t address, size_t length, uint64_t iova, unsigned int access,
		    struct rr_mr **mr);
int rr_reg_dmabuf_mr(struct rr_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access,
		     struct rr_mr **mr);
int rr_dereg_mr(struct rr_pd *pd, struct rr_mr *mr);

/* Register and deregister `count` times in a row; the first failure ends it. */
int rr_reg_mr_loop(struct rr_pd *pd, uintptr_t address, size_t length, unsigned int access, size_t count);

struct rr_transfer {
	uint8_t port;
	int gid_index; /* -1: address by LID (InfiniBand only) */
	int read; /* 1: RDMA READ, 0: RDMA WRITE */
	uint64_t source; /* addresses as the MRs know them (iova) */
	uint64_t target;
	uint32_t source_lkey;
	uint32_t source_rkey;
	uint32_t target_lkey;
	uint32_t target_rkey;
	uint64_t length;
	unsigned int timeout_ms;
};

/*
 * Move bytes from source to target over two RC queue pairs of this device connected to each other. -ETIMEDOUT: not
 * done in time; -EREMOTEIO: a work completion said no. `why` then holds a sentence.
 */
int rr_loopback(struct rr_pd *pd, const struct rr_transfer *transfer, char *why, size_t why_size);

#endif
