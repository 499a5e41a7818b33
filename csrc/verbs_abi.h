/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_VERBS_ABI_H
#define REGREPRO_VERBS_ABI_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/*
 * The part of libibverbs.so.1's binary interface that the core uses, declared here so that the core builds without
 * libibverbs' headers. The layouts are those of infiniband/verbs.h, frozen since the symbol version IBVERBS_1.1; a
 * test compares each with the header where that is installed (tests/c/verbs_layout.c).
 */

struct abi_context;

struct abi_pd {
	struct abi_context *context;
	uint32_t handle;
};

struct abi_mr {
	struct abi_context *context;
	struct abi_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

struct abi_device_attr {
	char fw_ver[64];
	uint64_t node_guid; /* big endian */
	uint64_t sys_image_guid; /* big endian */
	uint64_t max_mr_size;
	uint64_t page_size_cap;
	uint32_t vendor_id;
	uint32_t vendor_part_id;
	uint32_t hw_ver;
	int max_qp;
	int max_qp_wr;
	unsigned int device_cap_flags;
	int max_sge;
	int max_sge_rd;
	int max_cq;
	int max_cqe;
	int max_mr;
	int max_pd;
	int max_qp_rd_atom;
	int max_ee_rd_atom;
	int max_res_rd_atom;
	int max_qp_init_rd_atom;
	int max_ee_init_rd_atom;
	int atomic_cap;
	int max_ee;
	int max_rdd;
	int max_mw;
	int max_raw_ipv6_qp;
	int max_raw_ethy_qp;
	int max_mcast_grp;
	int max_mcast_qp_attach;
	int max_total_mcast_qp_attach;
	int max_ah;
	int max_fmr;
	int max_map_per_fmr;
	int max_srq;
	int max_srq_wr;
	int max_srq_sge;
	uint16_t max_pkeys;
	uint8_t local_ca_ack_delay;
	uint8_t phys_port_cnt;
};

struct abi_port_attr {
	int state;
	int max_mtu;
	int active_mtu;
	int gid_tbl_len;
	uint32_t port_cap_flags;
	uint32_t max_msg_sz;
	uint32_t bad_pkey_cntr;
	uint32_t qkey_viol_cntr;
	uint16_t pkey_tbl_len;
	uint16_t lid;
	uint16_t sm_lid;
	uint8_t lmc;
	uint8_t max_vl_num;
	uint8_t sm_sl;
	uint8_t subnet_timeout;
	uint8_t init_type_reply;
	uint8_t active_width;
	uint8_t active_speed;
	uint8_t phys_state;
	uint8_t link_layer;
	uint8_t flags;
	uint16_t port_cap_flags2;
};

union abi_gid {
	uint8_t raw[16];
	uint64_t halves[2]; /* big endian */
};

struct abi_global_route {
	union abi_gid dgid;
	uint32_t flow_label;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
};

struct abi_ah_attr {
	struct abi_global_route grh;
	uint16_t dlid;
	uint8_t sl;
	uint8_t src_path_bits;
	uint8_t static_rate;
	uint8_t is_global;
	uint8_t port_num;
};

struct abi_qp_cap {
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
};

struct abi_cq {
	struct abi_context *context;
	void *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
};

struct abi_qp_init_attr {
	void *qp_context;
	struct abi_cq *send_cq;
	struct abi_cq *recv_cq;
	void *srq;
	struct abi_qp_cap cap;
	int qp_type;
	int sq_sig_all;
};

struct abi_qp {
	struct abi_context *context;
	void *qp_context;
	struct abi_pd *pd;
	struct abi_cq *send_cq;
	struct abi_cq *recv_cq;
	void *srq;
	uint32_t handle;
	uint32_t qp_num;
};

struct abi_qp_attr {
	int qp_state;
	int cur_qp_state;
	int path_mtu;
	int path_mig_state;
	uint32_t qkey;
	uint32_t rq_psn;
	uint32_t sq_psn;
	uint32_t dest_qp_num;
	unsigned int qp_access_flags;
	struct abi_qp_cap cap;
	struct abi_ah_attr ah_attr;
	struct abi_ah_attr alt_ah_attr;
	uint16_t pkey_index;
	uint16_t alt_pkey_index;
	uint8_t en_sqd_async_notify;
	uint8_t sq_draining;
	uint8_t max_rd_atomic;
	uint8_t max_dest_rd_atomic;
	uint8_t min_rnr_timer;
	uint8_t port_num;
	uint8_t timeout;
	uint8_t retry_cnt;
	uint8_t rnr_retry;
	uint8_t alt_port_num;
	uint8_t alt_timeout;
	uint32_t rate_limit;
};

struct abi_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct abi_send_wr {
	uint64_t wr_id;
	struct abi_send_wr *next;
	struct abi_sge *sg_list;
	int num_sge;
	int opcode;
	unsigned int send_flags;
	uint32_t imm_data;
	/* A union in the header; `rdma` is its member for RDMA operations, the rest pads it to its size. */
	union {
		struct {
			uint64_t remote_addr;
			uint32_t rkey;
		} rdma;
		uint64_t size[4];
	} wr;
	uint32_t qp_type;
	uint64_t other[6];
};

struct abi_wc {
	uint64_t wr_id;
	int status;
	int opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_data;
	uint32_t qp_num;
	uint32_t src_qp;
	unsigned int wc_flags;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
};

struct abi_context {
	void *device;
	/* struct ibv_context_ops: 32 function pointers, of which two are called by inline functions of the header. */
	void *ops_before_poll_cq[11];
	int (*poll_cq)(struct abi_cq *cq, int entries, struct abi_wc *completions);
	void *ops_before_post_send[13];
	int (*post_send)(struct abi_qp *qp, struct abi_send_wr *request, struct abi_send_wr **bad);
	void *ops_after_post_send[6];
	int cmd_fd;
	int async_fd;
};

enum {
	ABI_QP_STATE = 1 << 0,
	ABI_QP_ACCESS_FLAGS = 1 << 3,
	ABI_QP_PKEY_INDEX = 1 << 4,
	ABI_QP_PORT = 1 << 5,
	ABI_QP_AV = 1 << 7,
	ABI_QP_PATH_MTU = 1 << 8,
	ABI_QP_TIMEOUT = 1 << 9,
	ABI_QP_RETRY_CNT = 1 << 10,
	ABI_QP_RNR_RETRY = 1 << 11,
	ABI_QP_RQ_PSN = 1 << 12,
	ABI_QP_MAX_QP_RD_ATOMIC = 1 << 13,
	ABI_QP_MIN_RNR_TIMER = 1 << 15,
	ABI_QP_SQ_PSN = 1 << 16,
	ABI_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
	ABI_QP_DEST_QPN = 1 << 20,
};

enum {
	ABI_QPT_RC = 2,
	ABI_QPS_INIT = 1,
	ABI_QPS_RTR = 2,
	ABI_QPS_RTS = 3,
	ABI_WR_RDMA_WRITE = 0,
	ABI_WR_RDMA_READ = 4,
	ABI_SEND_SIGNALED = 1 << 1,
	ABI_WC_SUCCESS = 0,
	ABI_PORT_ACTIVE = 4,
	ABI_LINK_LAYER_INFINIBAND = 1,
	ABI_ACCESS_LOCAL_WRITE = 1,
	ABI_ACCESS_REMOTE_WRITE = 2,
	ABI_ACCESS_REMOTE_READ = 4,
};

#endif
