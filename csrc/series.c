/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "series.h"

#define LINE_SIZE 2048

/* Cells of the memory that the writers share; record/writer.py has the reasons. */
enum { STATE, PAIRS };
enum { SEQ, SIZE };
#define WRITING 2

static volatile uint64_t *pair(volatile uint64_t *shared, uint64_t state)
{
	return shared + PAIRS + 2 * (state & 1);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int set_lock(int fd, short type)
{
	struct flock lock = { .l_type = type, .l_whence = SEEK_SET };
	int ret;

	do
		ret = fcntl(fd, F_SETLKW, &lock);
	while (ret && errno == EINTR);
	return ret ? -errno : 0;
}

/* A line whole or not at all. A short write to a regular file means that the disk took a part. */
static int write_line(int fd, const char *line, size_t length, uint64_t size)
{
	size_t written = 0;
	int error = 0;

	while (written < length && !error) {
		ssize_t ret = write(fd, line + written, length - written);

		if (ret > 0)
			written += (size_t)ret;
		else
			error = ret ? errno : ENOSPC;
	}
	if (written == length)
		return 0;
	if (written && ftruncate(fd, (off_t)size))
		error = errno;
	return -error;
}

/* What RecordWriter.event does, with the same order of steps: a writer may be killed between any two of them. */
static int append(const struct rr_record *record, const char *body, size_t body_length)
{
	/* volatile: another process puts the record right by what it finds here after a kill. */
	volatile uint64_t *shared = record->shared, *held, *next;
	char line[LINE_SIZE];
	uint64_t passed, state;
	int head, ret, unlocked;

	ret = set_lock(record->lock_fd, F_WRLCK);
	if (ret)
		return ret;
	state = shared[STATE];
	if (state & WRITING) {
		ret = -EAGAIN;
		goto out;
	}
	held = pair(shared, state);
	next = pair(shared, ~state);
	passed = now_ns() - record->start_ns;
	head = snprintf(line, sizeof(line), "{\"seq\":%" PRIu64 ",\"t\":%" PRIu64 ".%06u,", held[SEQ] + 1,
			passed / 1000000000, (unsigned int)(passed % 1000000000 / 1000));
	if (head < 0 || (size_t)head + body_length > sizeof(line)) {
		ret = -EMSGSIZE;
		goto out;
	}
	memcpy(line + head, body, body_length);
	shared[STATE] = state | WRITING;
	ret = write_line(record->fd, line, (size_t)head + body_length, held[SIZE]);
	if (!ret) {
		next[SEQ] = held[SEQ] + 1;
		next[SIZE] = held[SIZE] + (uint64_t)head + body_length;
	}
	shared[STATE] = ret ? state : ~state & 1;
out:
	unlocked = set_lock(record->lock_fd, F_UNLCK);
	return ret ? ret : unlocked;
}

static int note(const struct rr_record *record, const struct rr_series *series, size_t number, uintptr_t address,
		const struct rr_mr *mr, uint64_t took)
{
	char body[LINE_SIZE];
	int length = snprintf(body, sizeof(body),
			      "\"event\":\"registered\",%s,\"number\":%zu,\"address\":%" PRIuPTR ",\"length\":%zu,"
			      "\"errno\":null,\"lkey\":%" PRIu32 ",\"rkey\":%" PRIu32 ",\"seconds\":%" PRIu64 ".%09u}\n",
			      series->labels, number, address, series->length, mr->lkey, mr->rkey, took / 1000000000,
			      (unsigned int)(took % 1000000000));

	if (length < 0 || (size_t)length >= sizeof(body))
		return -EMSGSIZE;
	return append(record, body, (size_t)length);
}

int rr_register_series(struct rr_pd *pd, const struct rr_series *series, const struct rr_record *record,
		       struct rr_series_end *end)
{
	size_t number;

	end->seconds = 0;
	end->left = NULL;
	for (number = series->first; number < series->count; number++) {
		uintptr_t address = series->address + number % series->ranges * series->length;
		struct rr_mr *mr = NULL;
		uint64_t begun, took;
		int ret;

		end->number = number;
		begun = now_ns();
		ret = rr_reg_mr_iova2(pd, address, series->length, address, series->access, &mr);
		took = now_ns() - begun;
		if (ret) {
			end->where = RR_SERIES_REGISTER;
			end->seconds = (double)took / 1e9;
			return ret;
		}
		ret = note(record, series, number, address, mr, took);
		if (ret) {
			end->where = ret == -EAGAIN ? RR_SERIES_REPAIR : RR_SERIES_RECORD;
			if (rr_dereg_mr(pd, mr))
				end->left = mr;
			return ret; /* what is told is the record's failure */
		}
		if (series->kept) {
			series->kept[number] = mr;
			continue;
		}
		ret = rr_dereg_mr(pd, mr);
		if (ret) {
			end->where = RR_SERIES_DEREGISTER;
			end->left = mr;
			return ret;
		}
	}
	end->number = series->count;
	end->where = RR_SERIES_DONE;
	return 0;
}

int rr_deregister_series(struct rr_pd *pd, struct rr_mr **kept, size_t count)
{
	size_t number;
	int ret;

	for (number = 0; number < count; number++) {
		if (!kept[number])
			continue;
		ret = rr_dereg_mr(pd, kept[number]);
		if (ret)
			return ret;
		kept[number] = NULL;
	}
	return 0;
}
