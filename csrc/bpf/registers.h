/* The registers of a function's parameters and of what it returns, as a kprobe and a uprobe have them. */
#ifndef REGREPRO_REGISTERS_H
#define REGREPRO_REGISTERS_H

#if defined(__TARGET_ARCH_x86)
/* arch/x86/include/asm/ptrace.h */
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};

static __always_inline __u64 register_of(const struct pt_regs *registers, int position)
{
	switch (position) {
	case 0: return registers->di;
	case 1: return registers->si;
	case 2: return registers->dx;
	case 3: return registers->cx;
	case 4: return registers->r8;
	default: return registers->r9;
	}
}

static __always_inline __u64 returned_in(const struct pt_regs *registers)
{
	return registers->ax;
}
#elif defined(__TARGET_ARCH_arm64)
/* struct user_pt_regs, arch/arm64/include/uapi/asm/ptrace.h: what programs may read. */
struct pt_regs {
	unsigned long regs[31], sp, pc, pstate;
};

static __always_inline __u64 register_of(const struct pt_regs *registers, int position)
{
	switch (position) {
	case 0: return registers->regs[0];
	case 1: return registers->regs[1];
	case 2: return registers->regs[2];
	case 3: return registers->regs[3];
	case 4: return registers->regs[4];
	default: return registers->regs[5];
	}
}

static __always_inline __u64 returned_in(const struct pt_regs *registers)
{
	return registers->regs[0];
}
#else
#error "the registers of this architecture are not known here"
#endif

#endif
