/* Functions of the shape of libibverbs' verbs: NULL when something in them failed. For watch/branches.py. */

#include "branch_shapes.h"

/* Every failure passes one place, where all that was asked for is still in use. */
void *all_known(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	struct region *mr;

	if (pd->before(pd, addr, length))
		goto failed;
	mr = pd->op(pd, addr, length, iova, access);
	if (!mr)
		goto failed;
	mr->pd = pd;
	mr->addr = addr;
	mr->length = length;
	return mr;
failed:
	pd->tell(pd, addr, length, iova, access);
	return NULL;
}

/* As ibv_reg_mr_iova2. */
void *undone(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	unsigned relaxed = pd->old ? access & ~0xff00u : access;
	int odp = access & 0x40;
	struct region *mr;

	if (!odp && pd->before(pd, addr, length))
		return NULL;
	mr = pd->op(pd, addr, length, iova, relaxed);
	if (mr) {
		mr->pd = pd;
		mr->addr = addr;
		mr->length = length;
	} else if (!odp) {
		pd->after(pd, addr, length);
	}
	return mr;
}

/* As ibv_reg_dmabuf_mr: what fails takes the same way out, and nothing else. */
void *shared_way_out(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	struct region *mr = pd->op(pd, addr, length, iova, access);

	if (mr) {
		mr->pd = pd;
		mr->addr = addr;
		mr->length = length;
	}
	return mr;
}

/* A check before it, which fails in a place of its own or not. */
void *checked_first(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	struct region *mr;

	if (!length || pd->before(pd, addr, length))
		return NULL;
	mr = pd->op(pd, addr, length, iova, access);
	if (mr) {
		mr->pd = pd;
		mr->addr = addr;
		mr->length = length;
	}
	return mr;
}

/* As ibv_reg_mr_iova2 in other builds: what fails ends in two places that share nothing. */
void *two_tails(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	void *mr;

	if (pd->before(pd, addr, length)) {
		pd->tell(pd, addr, length, iova, access);
		return NULL;
	}
	mr = pd->op(pd, addr, length, iova, access);
	if (mr)
		return mr;
	pd->after(pd, addr, length);
	return NULL;
}

/* In the same place that another thing was NULL in, which says nothing. */
void *reused_place(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	struct region *mr = pd->op(pd, addr, length, iova, access), *again;

	if (!mr)
		pd->tell(pd, addr, length, iova, access);
	again = pd->op(pd, addr, length, iova, access);
	if (again)
		again->addr = addr;
	return again;
}

void *never_tested(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	void *mr = pd->op(pd, addr, length, iova, access);

	pd->after(pd, addr, length);
	return mr;
}

void *tail_call(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	if (pd->before(pd, addr, length)) {
		pd->after(pd, addr, length);
		return NULL;
	}
	return pd->op(pd, addr, length, iova, access);
}

void *selected(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	void *mr = pd->op(pd, addr, length, iova, access);

	return pd->before(pd, addr, length) ? NULL : mr;
}

void *computed_jump(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	static const void *const places[] = {&&first, &&second, &&third};
	void *mr;

	goto *places[pd->before(pd, addr, length) != 0];
first:
	mr = pd->op(pd, addr, length, iova, access);
	if (mr)
		return mr;
second:
	pd->tell(pd, addr, length, iova, access);
	return NULL;
third:
	return pd;
}

/* The result of one turn is not that of the next. */
void *tries_again(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	for (int left = 3; left; left--) {
		struct region *mr = pd->op(pd, addr, length, iova, access);

		if (mr) {
			mr->addr = addr;
			return mr;
		}
	}
	pd->tell(pd, addr, length, iova, access);
	return NULL;
}

/* Failures that are told of in two places, one of which can be passed many times. */
void *tells_often(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	void *mr = NULL;

	for (int left = 3; left && !mr; left--) {
		mr = pd->op(pd, addr, length, iova, access);
		if (!mr)
			pd->tell(pd, addr, length, iova, access);
	}
	if (!mr)
		pd->after(pd, addr, length);
	return mr;
}

/* Others get to know where the frame is, and write there. */
void *frame_given_away(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	struct request request = {addr, length, iova, access, ""};
	void *mr;

	pd->change(&request);
	mr = pd->op(pd, request.addr, request.length, request.iova, request.access);
	if (mr)
		return mr;
	pd->change(&request);
	pd->after(pd, request.addr, request.length);
	return NULL;
}

/* Arguments on the stack are the callee's, who changes them. */
void *stack_arguments(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	void *mr = pd->many(pd, 1, 2, 3, 4, 5, addr, length, iova, access, 6, 7);

	if (mr)
		return mr;
	pd->many(pd, 1, 2, 3, 4, 5, addr, length, iova, access, 6, 7);
	return NULL;
}

/* Half of a pointer says nothing of the pointer. */
void *half_tested(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	void *mr = pd->op(pd, addr, length, iova, access);

	if ((uint32_t)(uintptr_t)mr)
		return mr;
	pd->after(pd, addr, length);
	return mr;
}

/* More values than registers. */
void *crowded(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	uint64_t a = pd->number(pd), b = pd->number(pd), c = pd->number(pd), d = pd->number(pd);
	uint64_t e = pd->number(pd), f = pd->number(pd), g = pd->number(pd), h = pd->number(pd);
	void *mr;

	if (pd->before(pd, addr, length))
		goto failed;
	mr = pd->op(pd, addr, length, iova, access);
	if (!mr)
		goto failed;
	pd->sum = a * b + c * d + e * f + g * h;
	return mr;
failed:
	pd->sum = a + b + c + d + e + f + g + h;
	pd->tell(pd, addr, length, iova, access);
	return NULL;
}

/* A check before anything is kept, and none after it. */
void *early(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	void *mr;

	if (!length || pd->old)
		goto failed;
	mr = pd->op(pd, addr, length, iova, access);
	if (mr)
		return mr;
failed:
	pd->tell(pd, addr, length, iova, access);
	return NULL;
}
