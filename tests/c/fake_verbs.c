// SPDX-License-Identifier: Apache-2.0
/*
 * A library with libibverbs' functions and no device behind it: it notes what it is called with, answers what it is
 * told to, and moves bytes by memcpy. So the core's side of the interface can be tested on any machine.
 */
#include "verbs_abi.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

struct fake {
	uint64_t address;
	uint64_t length;
	uint64_t iova;
	uint64_t offset;
	int64_t fd;
	uint64_t access;
	int64_t error; /* errno of the next registration; -1: fail without one */
	int64_t dereg_error;
	int64_t status; /* of the next work completion; -1: none ever comes */
	int64_t regions; /* alive */
	int64_t pds;
	int64_t contexts;
	int64_t queues; /* QPs and CQs alive */
	int64_t dest_qp_num;
	int64_t sgid_index;
	int64_t good; /* registrations that succeed before `error` is looked at */
};

EXPORT struct fake fake_verbs;

static int the_device;
static void *the_list[2] = { &the_device, NULL };
static struct abi_wc pending;
static int pending_count;

static int poll_cq(struct abi_cq *cq, int entries, struct abi_wc *completions)
{
	(void)cq;
	if (!pending_count || entries < 1 || fake_verbs.status < 0)
		return 0;
	pending_count = 0;
	*completions = pending;
	return 1;
}

static int post_send(struct abi_qp *qp, struct abi_send_wr *request, struct abi_send_wr **bad)
{
	void *local = (void *)(uintptr_t)request->sg_list->addr;
	void *remote = (void *)(uintptr_t)request->wr.rdma.remote_addr;

	(void)qp;
	*bad = NULL;
	pending = (struct abi_wc){ .wr_id = request->wr_id, .status = (int)fake_verbs.status };
	pending_count = 1;
	if (fake_verbs.status == ABI_WC_SUCCESS) {
		if (request->opcode == ABI_WR_RDMA_READ)
			memcpy(local, remote, request->sg_list->length);
		else
			memcpy(remote, local, request->sg_list->length);
	}
	return 0;
}

EXPORT void **ibv_get_device_list(int *count)
{
	*count = 1;
	return the_list;
}

EXPORT void ibv_free_device_list(void **list)
{
	(void)list;
}

EXPORT const char *ibv_get_device_name(void *device)
{
	(void)device;
	return "fake0";
}

EXPORT struct abi_context *ibv_open_device(void *device)
{
	struct abi_context *context = calloc(1, sizeof(*context));

	context->device = device;
	context->poll_cq = poll_cq;
	context->post_send = post_send;
	fake_verbs.contexts++;
	return context;
}

EXPORT int ibv_close_device(struct abi_context *context)
{
	free(context);
	fake_verbs.contexts--;
	return 0;
}

EXPORT int ibv_query_device(struct abi_context *context, struct abi_device_attr *attributes)
{
	(void)context;
	memset(attributes, 0, sizeof(*attributes));
	strcpy(attributes->fw_ver, "1.2.3");
	attributes->max_mr = 42;
	attributes->max_mr_size = UINT64_MAX;
	attributes->vendor_id = 0xffffff;
	attributes->phys_port_cnt = 1;
	return 0;
}

EXPORT int ibv_query_port(struct abi_context *context, uint8_t port, struct abi_port_attr *attributes)
{
	(void)context;
	if (port != 1)
		return EINVAL;
	attributes->state = ABI_PORT_ACTIVE;
	attributes->active_mtu = 3;
	attributes->max_msg_sz = 1 << 16;
	attributes->link_layer = 2;
	return 0;
}

EXPORT int ibv_query_gid(struct abi_context *context, uint8_t port, int index, union abi_gid *gid)
{
	(void)context;
	(void)port;
	memset(gid, index, sizeof(*gid));
	if (index < 4)
		return 0;
	errno = EINVAL;
	return -1;
}

EXPORT struct abi_pd *ibv_alloc_pd(struct abi_context *context)
{
	struct abi_pd *pd = calloc(1, sizeof(*pd));

	pd->context = context;
	fake_verbs.pds++;
	return pd;
}

EXPORT int ibv_dealloc_pd(struct abi_pd *pd)
{
	if (pd->handle)
		return EBUSY;
	free(pd);
	fake_verbs.pds--;
	return 0;
}

static struct abi_mr *new_region(struct abi_pd *pd)
{
	struct abi_mr *mr;

	if (fake_verbs.good > 0) {
		fake_verbs.good--;
	} else if (fake_verbs.error) {
		if (fake_verbs.error > 0)
			errno = (int)fake_verbs.error;
		return NULL;
	}
	mr = calloc(1, sizeof(*mr));
	mr->context = pd->context;
	mr->pd = pd;
	mr->lkey = 0x1234;
	mr->rkey = 0x5678;
	pd->handle++; /* regions of this PD */
	fake_verbs.regions++;
	return mr;
}

EXPORT struct abi_mr *ibv_reg_mr(struct abi_pd *pd, void *address, size_t length, int access)
{
	fake_verbs.address = (uintptr_t)address;
	fake_verbs.length = length;
	fake_verbs.iova = 0;
	fake_verbs.access = (unsigned int)access;
	return new_region(pd);
}

EXPORT struct abi_mr *ibv_reg_mr_iova2(struct abi_pd *pd, void *address, size_t length, uint64_t iova,
				       unsigned int access)
{
	fake_verbs.address = (uintptr_t)address;
	fake_verbs.length = length;
	fake_verbs.iova = iova;
	fake_verbs.access = access;
	return new_region(pd);
}

EXPORT struct abi_mr *ibv_reg_dmabuf_mr(struct abi_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
					int access)
{
	fake_verbs.offset = offset;
	fake_verbs.length = length;
	fake_verbs.iova = iova;
	fake_verbs.fd = fd;
	fake_verbs.access = (unsigned int)access;
	return new_region(pd);
}

EXPORT int ibv_dereg_mr(struct abi_mr *mr)
{
	if (fake_verbs.dereg_error)
		return (int)fake_verbs.dereg_error;
	mr->pd->handle--;
	free(mr);
	fake_verbs.regions--;
	return 0;
}

EXPORT struct abi_cq *ibv_create_cq(struct abi_context *context, int entries, void *cq_context, void *channel,
				    int vector)
{
	struct abi_cq *cq = calloc(1, sizeof(*cq));

	(void)cq_context;
	(void)channel;
	(void)vector;
	cq->context = context;
	cq->cqe = entries;
	fake_verbs.queues++;
	return cq;
}

EXPORT int ibv_destroy_cq(struct abi_cq *cq)
{
	free(cq);
	fake_verbs.queues--;
	return 0;
}

EXPORT struct abi_qp *ibv_create_qp(struct abi_pd *pd, struct abi_qp_init_attr *attributes)
{
	struct abi_qp *qp = calloc(1, sizeof(*qp));

	qp->context = pd->context;
	qp->send_cq = attributes->send_cq;
	qp->qp_num = (uint32_t)(0x100 + fake_verbs.queues++);
	return qp;
}

EXPORT int ibv_modify_qp(struct abi_qp *qp, struct abi_qp_attr *attributes, int mask)
{
	(void)qp;
	if (mask & ABI_QP_AV) {
		fake_verbs.dest_qp_num = attributes->dest_qp_num;
		fake_verbs.sgid_index = attributes->ah_attr.grh.sgid_index;
	}
	return 0;
}

EXPORT int ibv_destroy_qp(struct abi_qp *qp)
{
	free(qp);
	fake_verbs.queues--;
	return 0;
}

EXPORT const char *ibv_wc_status_str(int status)
{
	(void)status;
	return "remote access error";
}
