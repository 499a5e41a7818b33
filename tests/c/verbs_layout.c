// SPDX-License-Identifier: Apache-2.0
/* Compares csrc/verbs_abi.h with the installed infiniband/verbs.h; compiling it is the test. */
#include "verbs_abi.h"

#include <infiniband/verbs.h>

#define SAME_SIZE(name) _Static_assert(sizeof(struct abi_##name) == sizeof(struct ibv_##name), "size of ibv_" #name)
#define SAME(name, field)                                                                                              \
	_Static_assert(offsetof(struct abi_##name, field) == offsetof(struct ibv_##name, field) &&                     \
			       sizeof(((struct abi_##name *)0)->field) == sizeof(((struct ibv_##name *)0)->field),     \
		       "ibv_" #name "." #field)
/* A struct whose tail (a mutex, …) is left out of ours. */
#define PREFIX(name) _Static_assert(sizeof(struct abi_##name) <= sizeof(struct ibv_##name), "size of ibv_" #name)
#define VALUE(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)

SAME(pd, context);
SAME_SIZE(pd);

SAME_SIZE(mr);
SAME(mr, addr);
SAME(mr, length);
SAME(mr, lkey);
SAME(mr, rkey);

SAME_SIZE(device_attr);
SAME(device_attr, fw_ver);
SAME(device_attr, node_guid);
SAME(device_attr, max_mr_size);
SAME(device_attr, page_size_cap);
SAME(device_attr, vendor_id);
SAME(device_attr, vendor_part_id);
SAME(device_attr, hw_ver);
SAME(device_attr, device_cap_flags);
SAME(device_attr, max_qp);
SAME(device_attr, max_cq);
SAME(device_attr, max_mr);
SAME(device_attr, max_pd);
SAME(device_attr, phys_port_cnt);

SAME_SIZE(port_attr);
SAME(port_attr, state);
SAME(port_attr, max_mtu);
SAME(port_attr, active_mtu);
SAME(port_attr, gid_tbl_len);
SAME(port_attr, max_msg_sz);
SAME(port_attr, lid);
SAME(port_attr, phys_state);
SAME(port_attr, link_layer);

_Static_assert(sizeof(union abi_gid) == sizeof(union ibv_gid), "size of ibv_gid");
SAME_SIZE(ah_attr);
SAME(ah_attr, grh);
SAME(ah_attr, dlid);
SAME(ah_attr, is_global);
SAME(ah_attr, port_num);
SAME(global_route, dgid);
SAME(global_route, sgid_index);
SAME(global_route, hop_limit);

SAME_SIZE(qp_init_attr);
SAME(qp_init_attr, send_cq);
SAME(qp_init_attr, recv_cq);
SAME(qp_init_attr, cap);
SAME(qp_init_attr, qp_type);

SAME_SIZE(qp_attr);
SAME(qp_attr, qp_state);
SAME(qp_attr, path_mtu);
SAME(qp_attr, dest_qp_num);
SAME(qp_attr, qp_access_flags);
SAME(qp_attr, ah_attr);
SAME(qp_attr, max_rd_atomic);
SAME(qp_attr, max_dest_rd_atomic);
SAME(qp_attr, min_rnr_timer);
SAME(qp_attr, port_num);
SAME(qp_attr, timeout);
SAME(qp_attr, retry_cnt);
SAME(qp_attr, rnr_retry);

SAME(qp, context);
SAME(qp, qp_num);
PREFIX(qp);
SAME(cq, context);
PREFIX(cq);

SAME_SIZE(sge);
SAME(sge, addr);
SAME(sge, length);
SAME(sge, lkey);

SAME_SIZE(send_wr);
SAME(send_wr, wr_id);
SAME(send_wr, sg_list);
SAME(send_wr, num_sge);
SAME(send_wr, opcode);
SAME(send_wr, send_flags);
SAME(send_wr, wr.rdma.remote_addr);
SAME(send_wr, wr.rdma.rkey);

SAME_SIZE(wc);
SAME(wc, wr_id);
SAME(wc, status);
SAME(wc, vendor_err);

_Static_assert(offsetof(struct abi_context, poll_cq) == offsetof(struct ibv_context, ops.poll_cq), "ops.poll_cq");
_Static_assert(offsetof(struct abi_context, post_send) == offsetof(struct ibv_context, ops.post_send), "ops.post_send");
SAME(context, cmd_fd);
SAME(context, async_fd);
PREFIX(context);

VALUE(ABI_QP_STATE, IBV_QP_STATE);
VALUE(ABI_QP_ACCESS_FLAGS, IBV_QP_ACCESS_FLAGS);
VALUE(ABI_QP_PKEY_INDEX, IBV_QP_PKEY_INDEX);
VALUE(ABI_QP_PORT, IBV_QP_PORT);
VALUE(ABI_QP_AV, IBV_QP_AV);
VALUE(ABI_QP_PATH_MTU, IBV_QP_PATH_MTU);
VALUE(ABI_QP_TIMEOUT, IBV_QP_TIMEOUT);
VALUE(ABI_QP_RETRY_CNT, IBV_QP_RETRY_CNT);
VALUE(ABI_QP_RNR_RETRY, IBV_QP_RNR_RETRY);
VALUE(ABI_QP_RQ_PSN, IBV_QP_RQ_PSN);
VALUE(ABI_QP_MAX_QP_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC);
VALUE(ABI_QP_MIN_RNR_TIMER, IBV_QP_MIN_RNR_TIMER);
VALUE(ABI_QP_SQ_PSN, IBV_QP_SQ_PSN);
VALUE(ABI_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_DEST_RD_ATOMIC);
VALUE(ABI_QP_DEST_QPN, IBV_QP_DEST_QPN);
VALUE(ABI_QPT_RC, IBV_QPT_RC);
VALUE(ABI_QPS_INIT, IBV_QPS_INIT);
VALUE(ABI_QPS_RTR, IBV_QPS_RTR);
VALUE(ABI_QPS_RTS, IBV_QPS_RTS);
VALUE(ABI_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE);
VALUE(ABI_WR_RDMA_READ, IBV_WR_RDMA_READ);
VALUE(ABI_SEND_SIGNALED, IBV_SEND_SIGNALED);
VALUE(ABI_WC_SUCCESS, IBV_WC_SUCCESS);
VALUE(ABI_PORT_ACTIVE, IBV_PORT_ACTIVE);
VALUE(ABI_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_INFINIBAND);
VALUE(ABI_ACCESS_LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE);
VALUE(ABI_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE);
VALUE(ABI_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_READ);
