// SPDX-License-Identifier: Apache-2.0
/* Devices, registrations and one loopback transfer, through a libibverbs that is opened at run time. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "verbs.h"

#include "verbs_abi.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

_Static_assert(sizeof(struct rr_mr) == sizeof(struct abi_mr), "struct rr_mr is struct ibv_mr");
_Static_assert(offsetof(struct rr_mr, lkey) == offsetof(struct abi_mr, lkey), "struct rr_mr is struct ibv_mr");
_Static_assert(offsetof(struct rr_mr, rkey) == offsetof(struct abi_mr, rkey), "struct rr_mr is struct ibv_mr");

/*
 * Every function that is looked up: its symbol and the version of it, whether a library may lack it, what it returns,
 * its name here, what it takes.
 */
#define VERBS(VERB) \
	VERB("ibv_get_device_list", "IBVERBS_1.1", false, void **, get_device_list, (int *count)) \
	VERB("ibv_free_device_list", "IBVERBS_1.1", false, void, free_device_list, (void **list)) \
	VERB("ibv_get_device_name", "IBVERBS_1.1", false, const char *, get_device_name, (void *device)) \
	VERB("ibv_open_device", "IBVERBS_1.1", false, struct abi_context *, open_device, (void *device)) \
	VERB("ibv_close_device", "IBVERBS_1.1", false, int, close_device, (struct abi_context *context)) \
	VERB("ibv_query_device", "IBVERBS_1.1", false, int, query_device, \
	     (struct abi_context *context, struct abi_device_attr *attributes)) \
	VERB("ibv_query_port", "IBVERBS_1.1", false, int, query_port, \
	     (struct abi_context *context, uint8_t port, struct abi_port_attr *attributes)) \
	VERB("ibv_query_gid", "IBVERBS_1.1", false, int, query_gid, \
	     (struct abi_context *context, uint8_t port, int index, union abi_gid *gid)) \
	VERB("ibv_alloc_pd", "IBVERBS_1.1", false, struct abi_pd *, alloc_pd, (struct abi_context *context)) \
	VERB("ibv_dealloc_pd", "IBVERBS_1.1", false, int, dealloc_pd, (struct abi_pd *pd)) \
	VERB("ibv_reg_mr", "IBVERBS_1.1", false, struct abi_mr *, reg_mr, \
	     (struct abi_pd *pd, void *address, size_t length, int access)) \
	VERB("ibv_reg_mr_iova2", "IBVERBS_1.8", true, struct abi_mr *, reg_mr_iova2, \
	     (struct abi_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access)) \
	VERB("ibv_reg_dmabuf_mr", "IBVERBS_1.12", true, struct abi_mr *, reg_dmabuf_mr, \
	     (struct abi_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)) \
	VERB("ibv_dereg_mr", "IBVERBS_1.1", false, int, dereg_mr, (struct abi_mr *mr)) \
	VERB("ibv_create_cq", "IBVERBS_1.1", false, struct abi_cq *, create_cq, \
	     (struct abi_context *context, int entries, void *cq_context, void *channel, int vector)) \
	VERB("ibv_destroy_cq", "IBVERBS_1.1", false, int, destroy_cq, (struct abi_cq *cq)) \
	VERB("ibv_create_qp", "IBVERBS_1.1", false, struct abi_qp *, create_qp, \
	     (struct abi_pd *pd, struct abi_qp_init_attr *attributes)) \
	VERB("ibv_modify_qp", "IBVERBS_1.1", false, int, modify_qp, \
	     (struct abi_qp *qp, struct abi_qp_attr *attributes, int mask)) \
	VERB("ibv_destroy_qp", "IBVERBS_1.1", false, int, destroy_qp, (struct abi_qp *qp)) \
	VERB("ibv_wc_status_str", "IBVERBS_1.1", false, const char *, wc_status_str, (int status))

#define MEMBER(symbol, version, optional, returns, member, parameters) returns (*member) parameters;
#define ROW(symbol, version, optional, returns, member, parameters) \
	{ symbol, version, offsetof(struct rr_verbs, member), optional },

struct rr_verbs {
	void *library;
	VERBS(MEMBER)
};

static const struct {
	const char *name;
	const char *version;
	size_t offset;
	bool optional;
} functions[] = { VERBS(ROW) };

struct rr_device {
	struct rr_verbs *verbs;
	struct abi_context *context;
};

struct rr_pd {
	struct rr_device *device;
	struct abi_pd *pd;
};

/* What a call that failed left in errno; a call that fails and says nothing is an I/O error to us. */
static int failure(void)
{
	return errno ? -errno : -EIO;
}

/*
 * The version matters: libibverbs.so.1 still carries the functions of the interface before 1.1, whose structures
 * differ, under the same names.
 */
static void *find(void *library, const char *name, const char *version)
{
	void *function;

#ifdef __GLIBC__
	function = dlvsym(library, name, version);
	if (function)
		return function;
#endif
	function = dlsym(library, name);
	return function;
}

int rr_verbs_load(const char *path, struct rr_verbs **result, char *why, size_t why_size)
{
	struct rr_verbs *verbs = calloc(1, sizeof(*verbs));
	size_t index;

	*result = NULL;
	snprintf(why, why_size, "out of memory");
	if (!verbs)
		return -ENOMEM;
	verbs->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!verbs->library) {
		const char *text = dlerror();

		snprintf(why, why_size, "%s", text ? text : path);
		free(verbs);
		return -ENOENT;
	}
	for (index = 0; index < sizeof(functions) / sizeof(functions[0]); index++) {
		void *function = find(verbs->library, functions[index].name, functions[index].version);

		if (!function && !functions[index].optional) {
			snprintf(why, why_size, "%s has no %s", path, functions[index].name);
			dlclose(verbs->library);
			free(verbs);
			return -ENOSYS;
		}
		memcpy((char *)verbs + functions[index].offset, &function, sizeof(function));
	}
	*why = '\0';
	*result = verbs;
	return 0;
}

void rr_verbs_unload(struct rr_verbs *verbs)
{
	dlclose(verbs->library);
	free(verbs);
}

int rr_verbs_devices(struct rr_verbs *verbs, char *names, size_t size)
{
	int count = 0;
	int index;
	void **list;

	errno = 0;
	list = verbs->get_device_list(&count);
	if (!list)
		return failure();
	for (index = 0; index < count; index++) {
		const char *name = verbs->get_device_name(list[index]);
		size_t length = strlen(name) + 1;

		if (length > size) {
			count = -ERANGE;
			break;
		}
		memcpy(names, name, length);
		names += length;
		size -= length;
	}
	verbs->free_device_list(list);
	return count;
}

int rr_device_open(struct rr_verbs *verbs, const char *name, struct rr_device **result)
{
	struct rr_device *device;
	int ret = -ENODEV;
	int count = 0;
	int index;
	void **list;

	*result = NULL;
	device = calloc(1, sizeof(*device));
	if (!device)
		return -ENOMEM;
	device->verbs = verbs;
	errno = 0;
	list = verbs->get_device_list(&count);
	if (!list) {
		ret = failure();
		free(device);
		return ret;
	}
	for (index = 0; index < count; index++) {
		if (strcmp(verbs->get_device_name(list[index]), name))
			continue;
		errno = 0;
		device->context = verbs->open_device(list[index]);
		ret = device->context ? 0 : failure();
		break;
	}
	verbs->free_device_list(list);
	if (ret)
		free(device);
	else
		*result = device;
	return ret;
}

int rr_device_close(struct rr_device *device)
{
	int ret = 0;

	errno = 0;
	if (device->verbs->close_device(device->context))
		ret = failure();
	free(device);
	return ret;
}

int rr_device_query(struct rr_device *device, struct rr_device_attributes *attributes)
{
	struct abi_device_attr raw;
	int ret;

	memset(&raw, 0, sizeof(raw));
	memset(attributes, 0, sizeof(*attributes));
	ret = device->verbs->query_device(device->context, &raw);
	if (ret)
		return -abs(ret);
	memcpy(attributes->fw_ver, raw.fw_ver, sizeof(attributes->fw_ver) - 1);
	attributes->node_guid = be64toh(raw.node_guid);
	attributes->max_mr_size = raw.max_mr_size;
	attributes->page_size_cap = raw.page_size_cap;
	attributes->vendor_id = raw.vendor_id;
	attributes->vendor_part_id = raw.vendor_part_id;
	attributes->hw_ver = raw.hw_ver;
	attributes->device_cap_flags = raw.device_cap_flags;
	attributes->max_mr = raw.max_mr;
	attributes->max_pd = raw.max_pd;
	attributes->max_qp = raw.max_qp;
	attributes->max_cq = raw.max_cq;
	attributes->ports = raw.phys_port_cnt;
	return 0;
}

int rr_port_query(struct rr_device *device, uint8_t port, struct rr_port_attributes *attributes)
{
	struct abi_port_attr raw;
	int ret;

	memset(&raw, 0, sizeof(raw));
	memset(attributes, 0, sizeof(*attributes));
	/* This symbol fills the structure up to `flags`; what came later is not asked for here. */
	ret = device->verbs->query_port(device->context, port, &raw);
	if (ret)
		return -abs(ret);
	attributes->state = raw.state;
	attributes->max_mtu = raw.max_mtu;
	attributes->active_mtu = raw.active_mtu;
	attributes->gid_table_length = raw.gid_tbl_len;
	attributes->max_msg_size = raw.max_msg_sz;
	attributes->lid = raw.lid;
	attributes->link_layer = raw.link_layer;
	attributes->physical_state = raw.phys_state;
	return 0;
}

int rr_pd_alloc(struct rr_device *device, struct rr_pd **result)
{
	struct rr_pd *pd = calloc(1, sizeof(*pd));
	int ret;

	*result = NULL;
	if (!pd)
		return -ENOMEM;
	pd->device = device;
	errno = 0;
	pd->pd = device->verbs->alloc_pd(device->context);
	if (!pd->pd) {
		ret = failure();
		free(pd);
		return ret;
	}
	*result = pd;
	return 0;
}

int rr_pd_dealloc(struct rr_pd *pd)
{
	int ret = pd->device->verbs->dealloc_pd(pd->pd);

	if (ret)
		return -abs(ret);
	free(pd);
	return 0;
}

static int registered(struct abi_mr *raw, struct rr_mr **mr)
{
	*mr = (struct rr_mr *)raw;
	return raw ? 0 : failure();
}

int rr_reg_mr(struct rr_pd *pd, uintptr_t address, size_t length, int access, struct rr_mr **mr)
{
	errno = 0;
	return registered(pd->device->verbs->reg_mr(pd->pd, (void *)address, length, access), mr);
}

int rr_reg_mr_iova2(struct rr_pd *pd, uintptr_t address, size_t length, uint64_t iova, unsigned int access,
		    struct rr_mr **mr)
{
	struct rr_verbs *verbs = pd->device->verbs;

	*mr = NULL;
	if (!verbs->reg_mr_iova2)
		return -ENOSYS;
	errno = 0;
	return registered(verbs->reg_mr_iova2(pd->pd, (void *)address, length, iova, access), mr);
}

int rr_reg_dmabuf_mr(struct rr_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access,
		     struct rr_mr **mr)
{
	struct rr_verbs *verbs = pd->device->verbs;

	*mr = NULL;
	if (!verbs->reg_dmabuf_mr)
		return -ENOSYS;
	errno = 0;
	return registered(verbs->reg_dmabuf_mr(pd->pd, offset, length, iova, fd, access), mr);
}

int rr_dereg_mr(struct rr_pd *pd, struct rr_mr *mr)
{
	return -abs(pd->device->verbs->dereg_mr((struct abi_mr *)mr));
}

int rr_reg_mr_loop(struct rr_pd *pd, uintptr_t address, size_t length, unsigned int access, size_t count)
{
	struct rr_mr *mr;
	int ret = 0;

	while (!ret && count--) {
		ret = rr_reg_mr_iova2(pd, address, length, address, access, &mr);
		if (!ret)
			ret = rr_dereg_mr(pd, mr);
	}
	return ret;
}

/* ---- loopback ---- */

static uint64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Change a queue pair's state; the attributes are empty afterwards. */
static int modify(struct rr_verbs *verbs, struct abi_qp *qp, struct abi_qp_attr *attributes, int mask,
		  const char *state, char *why, size_t why_size)
{
	int ret = verbs->modify_qp(qp, attributes, ABI_QP_STATE | mask);

	if (ret)
		snprintf(why, why_size, "ibv_modify_qp to %s: %s", state, strerror(abs(ret)));
	memset(attributes, 0, sizeof(*attributes));
	return -abs(ret);
}

static int connect_qp(struct rr_pd *pd, struct abi_qp *qp, const struct abi_qp *peer, const struct rr_transfer *transfer,
		      const struct rr_port_attributes *port, const union abi_gid *gid, char *why, size_t why_size)
{
	struct rr_verbs *verbs = pd->device->verbs;
	struct abi_qp_attr attributes;
	int ret;

	memset(&attributes, 0, sizeof(attributes));
	attributes.qp_state = ABI_QPS_INIT;
	attributes.port_num = transfer->port;
	attributes.qp_access_flags = ABI_ACCESS_LOCAL_WRITE | ABI_ACCESS_REMOTE_WRITE | ABI_ACCESS_REMOTE_READ;
	ret = modify(verbs, qp, &attributes, ABI_QP_PKEY_INDEX | ABI_QP_PORT | ABI_QP_ACCESS_FLAGS, "INIT", why, why_size);
	if (ret)
		return ret;
	attributes.qp_state = ABI_QPS_RTR;
	attributes.path_mtu = port->active_mtu;
	attributes.dest_qp_num = peer->qp_num;
	attributes.max_dest_rd_atomic = 1;
	attributes.min_rnr_timer = 12;
	attributes.ah_attr.port_num = transfer->port;
	attributes.ah_attr.dlid = port->lid;
	if (transfer->gid_index >= 0) {
		attributes.ah_attr.is_global = 1;
		attributes.ah_attr.grh.dgid = *gid;
		attributes.ah_attr.grh.sgid_index = (uint8_t)transfer->gid_index;
		attributes.ah_attr.grh.hop_limit = 64;
	}
	ret = modify(verbs, qp, &attributes,
		     ABI_QP_AV | ABI_QP_PATH_MTU | ABI_QP_DEST_QPN | ABI_QP_RQ_PSN | ABI_QP_MAX_DEST_RD_ATOMIC |
			     ABI_QP_MIN_RNR_TIMER,
		     "RTR", why, why_size);
	if (ret)
		return ret;
	attributes.qp_state = ABI_QPS_RTS;
	attributes.timeout = 14;
	attributes.retry_cnt = 7;
	attributes.rnr_retry = 7;
	attributes.max_rd_atomic = 1;
	return modify(verbs, qp, &attributes,
		      ABI_QP_TIMEOUT | ABI_QP_RETRY_CNT | ABI_QP_RNR_RETRY | ABI_QP_SQ_PSN | ABI_QP_MAX_QP_RD_ATOMIC,
		      "RTS", why, why_size);
}

static int await_completion(struct rr_verbs *verbs, struct abi_cq *cq, uint64_t deadline, char *why, size_t why_size)
{
	struct timespec nap = { .tv_nsec = 50000 };
	struct abi_wc completion;
	unsigned int polls = 0;
	int got;

	for (;;) {
		memset(&completion, 0, sizeof(completion));
		got = cq->context->poll_cq(cq, 1, &completion);
		if (got < 0) {
			snprintf(why, why_size, "ibv_poll_cq failed");
			return -EIO;
		}
		if (got > 0) {
			if (completion.status == ABI_WC_SUCCESS)
				return 0;
			snprintf(why, why_size, "work completion: %s (status %d, vendor error %#x)",
				 verbs->wc_status_str(completion.status), completion.status, completion.vendor_err);
			return -EREMOTEIO;
		}
		if (now_ms() >= deadline) {
			snprintf(why, why_size, "no work completion in time");
			return -ETIMEDOUT;
		}
		/* A software device needs the CPU to make progress; a long wait need not burn one. */
		if (++polls < 64)
			sched_yield();
		else
			nanosleep(&nap, NULL);
	}
}

static int move_bytes(struct rr_verbs *verbs, struct abi_qp *qp, struct abi_cq *cq, const struct rr_transfer *transfer,
		      uint64_t piece, char *why, size_t why_size)
{
	uint64_t deadline = now_ms() + transfer->timeout_ms;
	uint64_t done = 0;

	do {
		uint64_t length = transfer->length - done < piece ? transfer->length - done : piece;
		struct abi_send_wr request, *bad = NULL;
		struct abi_sge local;
		int ret;

		memset(&request, 0, sizeof(request));
		local.length = (uint32_t)length;
		local.addr = (transfer->read ? transfer->target : transfer->source) + done;
		local.lkey = transfer->read ? transfer->target_lkey : transfer->source_lkey;
		request.wr.rdma.remote_addr = (transfer->read ? transfer->source : transfer->target) + done;
		request.wr.rdma.rkey = transfer->read ? transfer->source_rkey : transfer->target_rkey;
		request.wr_id = done;
		request.sg_list = &local;
		request.num_sge = 1;
		request.opcode = transfer->read ? ABI_WR_RDMA_READ : ABI_WR_RDMA_WRITE;
		request.send_flags = ABI_SEND_SIGNALED;
		ret = qp->context->post_send(qp, &request, &bad);
		if (ret) {
			snprintf(why, why_size, "ibv_post_send: %s", strerror(abs(ret)));
			return -abs(ret);
		}
		ret = await_completion(verbs, cq, deadline, why, why_size);
		if (ret)
			return ret;
		done += length;
	} while (done < transfer->length);
	return 0;
}

int rr_loopback(struct rr_pd *pd, const struct rr_transfer *transfer, char *why, size_t why_size)
{
	struct rr_verbs *verbs = pd->device->verbs;
	struct abi_context *context = pd->device->context;
	struct rr_port_attributes port;
	struct abi_qp *qps[2] = { NULL, NULL };
	struct abi_cq *cq = NULL;
	struct abi_qp_init_attr initial;
	union abi_gid gid;
	uint64_t piece;
	size_t index;
	int ret;

	*why = '\0';
	ret = rr_port_query(pd->device, transfer->port, &port);
	if (ret) {
		snprintf(why, why_size, "ibv_query_port: %s", strerror(-ret));
		return ret;
	}
	if (port.state != ABI_PORT_ACTIVE) {
		snprintf(why, why_size, "port %d is not active", transfer->port);
		return -ENETDOWN;
	}
	memset(&gid, 0, sizeof(gid));
	errno = 0;
	if (transfer->gid_index >= 0 &&
	    verbs->query_gid(context, transfer->port, transfer->gid_index, &gid)) {
		snprintf(why, why_size, "ibv_query_gid: there is no GID with index %d", transfer->gid_index);
		return failure();
	}
	/* One message a piece; far below 2^31, so that the time limit is looked at now and then. */
	piece = port.max_msg_size && port.max_msg_size < (1u << 26) ? port.max_msg_size : 1u << 26;
	errno = 0;
	cq = verbs->create_cq(context, 16, NULL, NULL, 0);
	if (!cq) {
		ret = failure();
		snprintf(why, why_size, "ibv_create_cq: %s", strerror(-ret));
		goto out;
	}
	for (index = 0; index < 2; index++) {
		memset(&initial, 0, sizeof(initial));
		initial.send_cq = cq;
		initial.recv_cq = cq;
		initial.cap.max_send_wr = 4;
		initial.cap.max_recv_wr = 1;
		initial.cap.max_send_sge = 1;
		initial.cap.max_recv_sge = 1;
		initial.qp_type = ABI_QPT_RC;
		errno = 0;
		qps[index] = verbs->create_qp(pd->pd, &initial);
		if (!qps[index]) {
			ret = failure();
			snprintf(why, why_size, "ibv_create_qp: %s", strerror(-ret));
			goto out;
		}
	}
	ret = connect_qp(pd, qps[0], qps[1], transfer, &port, &gid, why, why_size);
	if (!ret)
		ret = connect_qp(pd, qps[1], qps[0], transfer, &port, &gid, why, why_size);
	if (!ret)
		ret = move_bytes(verbs, qps[0], cq, transfer, piece, why, why_size);
out:
	for (index = 0; index < 2; index++)
		if (qps[index])
			verbs->destroy_qp(qps[index]);
	if (cq)
		verbs->destroy_cq(cq);
	return ret;
}
