#include <stddef.h>
#include <stdint.h>

struct domain;

struct region {
	struct domain *pd;
	void *addr;
	size_t length;
};

struct request {
	void *addr;
	size_t length;
	uint64_t iova;
	unsigned access;
	char name[40];
};

struct domain {
	void *(*op)(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access);
	void *(*many)(struct domain *pd, int a, int b, int c, int d, int e, void *addr, size_t length, uint64_t iova,
		      unsigned access, int f, int g);
	int (*before)(struct domain *pd, void *addr, size_t length);
	void (*after)(struct domain *pd, void *addr, size_t length);
	void (*tell)(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access);
	void (*change)(struct request *request);
	uint64_t (*number)(struct domain *pd);
	int old;
	uint64_t sum;
	/* What the functions above do. */
	int fail_before;
	int fail_op; /* so many times */
	struct region region;
};
