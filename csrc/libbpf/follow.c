// SPDX-License-Identifier: Apache-2.0
/*
 * Loads csrc/bpf/registrations.bpf.c by libbpf, attaches its programs, and hands the descriptors to whoever started it,
 * who may then let this process end: maps, programs and links live as long as their descriptors. A program of its own
 * and no part of the core, since Debian's static libbpf and libelf are not compiled for shared libraries.
 *
 * Descriptor 0 is a socket (SOCK_SEQPACKET). Each packet is a `struct request`; each is answered by a `struct answer`
 * and, where there is something to hand over, descriptors (SCM_RIGHTS). It ends when the socket does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <bpf/bpf.h>
#include <bpf/btf.h>
#include <bpf/libbpf.h>

#define MOST_DESCRIPTORS 2
#define CONFIG_BYTES 128 /* struct config of registrations.bpf.c is less */

enum what {
	OPEN = 1,   /* text: the object's path */
	CONFIG = 2, /* text: what becomes of `config`, `number` bytes */
	SHARE = 3,  /* text: a map's name; with its descriptor: of an object before this one */
	TARGET = 4, /* text: a function of the kernel that trampolines are tried with; without it none are loaded */
	LOAD = 5,
	MAP = 6,	/* text: a map's name */
	TRAMPOLINE = 7, /* text: the function; module: where it is, "" in the kernel itself */
	KPROBE = 8,	/* text: the function */
	UPROBE = 9,	/* text: the file's path; number: the offset in it */
};

struct request {
	uint32_t what;
	uint32_t at_return;
	uint64_t number;
	uint64_t cookie;
	char program[32];
	char module[64];
	char text[4096];
};

struct answer {
	int32_t ret; /* 0 or -errno */
	char said[2044]; /* libbpf's complaint, or the verifier's */
};

static struct answer answer;

/* The end of what libbpf says is kept: there the verifier says what it does not like. */
static int keep_words(enum libbpf_print_level level, const char *format, va_list arguments)
{
	size_t used = strlen(answer.said), length, room = sizeof(answer.said) - 1;
	char *words;
	int ret;

	if (level == LIBBPF_DEBUG)
		return 0;
	ret = vasprintf(&words, format, arguments);
	if (ret < 0)
		return ret;
	length = (size_t)ret;
	if (length >= room) {
		memcpy(answer.said, words + length - room, room);
	} else {
		if (used + length > room) {
			memmove(answer.said, answer.said + used + length - room, room - length);
			used = room - length;
		}
		memcpy(answer.said + used, words, length);
	}
	free(words);
	return 0;
}

/* One packet; 0 at the end. `given`: a descriptor that came with it, or -1. */
static ssize_t receive(struct request *request, int *given)
{
	char control[CMSG_SPACE(sizeof(int))];
	struct iovec data = { request, sizeof(*request) };
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)
	};
	struct cmsghdr *head;
	ssize_t got;

	*given = -1;
	got = recvmsg(0, &message, MSG_CMSG_CLOEXEC);
	if (got <= 0)
		return got;
	head = CMSG_FIRSTHDR(&message);
	if (head && head->cmsg_type == SCM_RIGHTS)
		memcpy(given, CMSG_DATA(head), sizeof(*given));
	return got == sizeof(*request) ? got : -1;
}

static int reply(const int *descriptors, int count)
{
	char control[CMSG_SPACE(sizeof(int) * MOST_DESCRIPTORS)] = "";
	struct iovec data = { &answer, sizeof(answer) };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1 };
	struct cmsghdr *head;

	if (count) {
		message.msg_control = control;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
		head = CMSG_FIRSTHDR(&message);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
		memcpy(CMSG_DATA(head), descriptors, sizeof(int) * (size_t)count);
	}
	return sendmsg(0, &message, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static bool is_trampoline(const struct bpf_program *program)
{
	return bpf_program__type(program) == BPF_PROG_TYPE_TRACING;
}

static int set_target(struct bpf_object *object, const char *target)
{
	struct bpf_program *program;
	int ret;

	bpf_object__for_each_program(program, object) {
		if (!is_trampoline(program))
			continue;
		ret = bpf_program__set_autoload(program, target != NULL);
		if (!ret && target)
			ret = bpf_program__set_attach_target(program, 0, target);
		if (ret)
			return ret;
	}
	return 0;
}

/* The descriptor of a module's types; -ENOENT: it has none. */
static int open_types(const char *module)
{
	char name[64] = ""; /* MODULE_NAME_LEN is less */
	uint32_t id = 0, length;
	int ret, fd;

	while (!(ret = bpf_btf_get_next_id(id, &id))) {
		struct bpf_btf_info info = { .name = (uintptr_t)name, .name_len = sizeof(name) };

		length = sizeof(info);
		fd = bpf_btf_get_fd_by_id(id);
		if (fd == -ENOENT)
			continue; /* it went away just now */
		if (fd < 0)
			return fd;
		if (!bpf_obj_get_info_by_fd(fd, &info, &length) && info.kernel_btf && !strcmp(name, module))
			return fd;
		close(fd);
	}
	return ret;
}

/* Find the function in the kernel's types or in its module's: what the kernel wants to know to attach there. */
static int find_function(const struct request *request, struct bpf_prog_load_opts *load)
{
	struct btf *kernel = btf__load_vmlinux_btf(), *module = NULL;
	int ret = -errno, types = 0;

	if (!kernel)
		return ret;
	if (request->module[0]) {
		types = open_types(request->module);
		ret = types < 0 ? types : -ENOENT;
		if (types >= 0)
			module = btf__load_module_btf(request->module, kernel);
		if (!module)
			goto out;
	}
	ret = btf__find_by_name_kind(module ? module : kernel, request->text, BTF_KIND_FUNC);
	if (ret > 0) {
		load->attach_btf_id = (uint32_t)ret;
		load->attach_btf_obj_fd = (uint32_t)types;
		types = 0;
		ret = 0;
	}
out:
	if (types > 0)
		close(types);
	btf__free(module);
	btf__free(kernel);
	return ret;
}

/* The instructions are those of the object that was loaded: its maps and what CO-RE found out are in them. */
static int by_trampoline(const struct bpf_program *from, const struct request *request, int *handed)
{
	LIBBPF_OPTS(bpf_prog_load_opts, load);
	LIBBPF_OPTS(bpf_link_create_opts, create, .tracing.cookie = request->cookie);
	int ret;

	ret = find_function(request, &load);
	if (ret)
		return ret;
	load.expected_attach_type = bpf_program__expected_attach_type(from);
	handed[1] = bpf_prog_load(BPF_PROG_TYPE_TRACING, bpf_program__name(from), "Dual BSD/GPL",
				  bpf_program__insns(from), bpf_program__insn_cnt(from), &load);
	if (load.attach_btf_obj_fd)
		close((int)load.attach_btf_obj_fd);
	if (handed[1] < 0)
		return handed[1];
	handed[0] = bpf_link_create(handed[1], 0, load.expected_attach_type, &create);
	return handed[0] < 0 ? handed[0] : 0;
}

static int by_probe(const struct bpf_program *from, const struct request *request, struct bpf_link **link)
{
	LIBBPF_OPTS(bpf_kprobe_opts, kernel, .bpf_cookie = request->cookie, .retprobe = request->at_return);
	LIBBPF_OPTS(bpf_uprobe_opts, user, .bpf_cookie = request->cookie, .retprobe = request->at_return);

	*link = request->what == KPROBE ?
			bpf_program__attach_kprobe_opts(from, request->text, &kernel) :
			bpf_program__attach_uprobe_opts(from, -1, request->text, request->number, &user);
	return *link ? 0 : -errno;
}

static int attach(struct bpf_object *object, const struct request *request, int *handed)
{
	const struct bpf_program *from = bpf_object__find_program_by_name(object, request->program);
	struct bpf_link *link = NULL;
	int ret;

	if (!from)
		return -ENOENT;
	if (request->what == TRAMPOLINE) {
		ret = by_trampoline(from, request, handed);
		return ret ? ret : reply(handed, 2);
	}
	ret = by_probe(from, request, &link);
	if (ret)
		return ret;
	handed[0] = bpf_link__fd(link);
	handed[1] = bpf_program__fd(from);
	ret = reply(handed, 2);
	handed[0] = handed[1] = -1; /* libbpf's own */
	bpf_link__destroy(link);
	return ret;
}

static int config_of(struct bpf_object *object, const struct request *request)
{
	struct bpf_map *map = bpf_object__find_map_by_name(object, ".rodata");

	if (!map || request->number != bpf_map__value_size(map))
		return -EINVAL;
	return bpf_map__set_initial_value(map, request->text, request->number);
}

/* Returns what is to be answered, or 1 where it was. */
static int serve(struct bpf_object **object, const struct request *request, int given)
{
	int handed[MOST_DESCRIPTORS] = { -1, -1 }, ret;
	struct bpf_map *map;

	if (request->what == OPEN) {
		if (*object)
			return -EEXIST;
		*object = bpf_object__open_file(request->text, NULL);
		return *object ? set_target(*object, NULL) : -errno;
	}
	if (!*object)
		return -EBADF;
	map = bpf_object__find_map_by_name(*object, request->text);
	switch (request->what) {
	case CONFIG:
		return config_of(*object, request);
	case SHARE:
		return map ? bpf_map__reuse_fd(map, given) : -ENOENT;
	case TARGET:
		return set_target(*object, request->text);
	case LOAD:
		return bpf_object__load(*object);
	case MAP:
		handed[0] = map ? bpf_map__fd(map) : -1;
		if (handed[0] < 0)
			return -ENOENT;
		ret = reply(handed, 1);
		return ret ? ret : 1;
	case TRAMPOLINE:
	case KPROBE:
	case UPROBE:
		ret = attach(*object, request, handed);
		for (int index = 0; index < MOST_DESCRIPTORS; index++)
			if (handed[index] >= 0)
				close(handed[index]);
		return ret ? ret : 1;
	default:
		return -EINVAL;
	}
}

int main(void)
{
	struct bpf_object *object = NULL;
	static struct request request;
	int given, ret;
	ssize_t got;

	libbpf_set_print(keep_words);
	while ((got = receive(&request, &given)) > 0) {
		request.program[sizeof(request.program) - 1] = request.text[sizeof(request.text) - 1] = '\0';
		memset(&answer, 0, sizeof(answer));
		ret = serve(&object, &request, given);
		if (given >= 0)
			close(given);
		if (ret > 0)
			continue;
		answer.ret = ret;
		if (reply(NULL, 0))
			break;
	}
	if (object)
		bpf_object__close(object);
	return got < 0;
}
