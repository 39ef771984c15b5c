/* One thread changes, others ask meanwhile: what the kernel keeps afterwards is what there is.
 *
 *   late_answers DIR ROUNDS
 *
 * Prints how often it was not, for each kind of change; the exit status says whether it ever was. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { READERS = 2, ASKED_MAX = 6, PAUSE_MAX = 3000 };

static pthread_barrier_t begun, ended;
static volatile int over;
static const char *asked;

static void must(int ok, const char *what)
{
	if (!ok) {
		fprintf(stderr, "%s: %s\n", what, strerror(errno));
		exit(2);
	}
}

static struct statx look(const char *path, int flags)
{
	struct statx found;
	must(statx(AT_FDCWD, path, flags, STATX_BASIC_STATS, &found) == 0, path);
	return found;
}

static void *ask(void *seed)
{
	unsigned random = (unsigned)(size_t)seed;
	for (;;) {
		pthread_barrier_wait(&begun);
		if (over)
			return NULL;
		for (int left = rand_r(&random) % ASKED_MAX; left >= 0; left--)
			look(asked, AT_STATX_FORCE_SYNC);
		pthread_barrier_wait(&ended);
	}
}

static int same_time(struct statx_timestamp a, struct statx_timestamp b)
{
	return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

static int same(struct statx a, struct statx b)
{
	return a.stx_mode == b.stx_mode && a.stx_nlink == b.stx_nlink && a.stx_size == b.stx_size &&
	       same_time(a.stx_atime, b.stx_atime) && same_time(a.stx_mtime, b.stx_mtime) && same_time(a.stx_ctime, b.stx_ctime);
}

static void names(const char *dir, int round)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/name", dir);
	if (round % 2 == 0)
		must(close(open(path, O_CREAT | O_EXCL | O_WRONLY, 0644)) == 0, path);
	else
		must(unlink(path) == 0, path);
}

static void directories(const char *dir, int round)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/directory", dir);
	must((round % 2 == 0 ? mkdir(path, 0755) : rmdir(path)) == 0, path);
}

static void attributes(const char *file, int round)
{
	must(setxattr(file, "user.round", &round, sizeof round, 0) == 0, file);
}

static void holes(const char *file, int round)
{
	int fd = open(file, O_RDWR);
	int how = round % 2 == 0 ? FALLOC_FL_KEEP_SIZE : FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE;
	must(fd >= 0 && fallocate(fd, how, 0, 4096) == 0 && close(fd) == 0, file);
}

static void reads(const char *file, int round)
{
	struct timespec past[2] = { { .tv_sec = 1 }, { .tv_sec = 2 + round } };
	_Alignas(4096) static char page[4096];
	if (round % 2 == 0) {
		/* Of an empty file nothing is asked. */
		must(truncate(file, sizeof page) == 0 && utimensat(AT_FDCWD, file, past, 0) == 0, file);
		return;
	}
	int fd = open(file, O_RDONLY | O_DIRECT);
	must(fd >= 0 && read(fd, page, sizeof page) >= 0 && close(fd) == 0, file);
}

static const struct {
	const char *name;
	void (*change)(const char *path, int round);
	int in_directory;
} KINDS[] = { { "names", names, 1 }, { "directories", directories, 1 }, { "attributes", attributes, 0 }, { "holes", holes, 0 },
	    { "reads", reads, 0 } };

int main(int count, char **words)
{
	must(count == 3, "late_answers DIR ROUNDS");
	pthread_t readers[READERS];
	pthread_barrier_init(&begun, NULL, READERS + 1);
	pthread_barrier_init(&ended, NULL, READERS + 1);
	for (size_t n = 0; n < READERS; n++)
		must(pthread_create(&readers[n], NULL, ask, (void *)(n + 1)) == 0, "pthread_create");
	unsigned random = 7;
	int all = 0;
	for (size_t kind = 0; kind < sizeof KINDS / sizeof *KINDS; kind++) {
		char path[4096];
		snprintf(path, sizeof path, "%s/%s", words[1], KINDS[kind].name);
		if (KINDS[kind].in_directory)
			must(mkdir(path, 0755) == 0, path);
		else
			must(close(open(path, O_CREAT | O_RDWR, 0644)) == 0, path);
		asked = path;
		int stale = 0;
		for (int round = 0; round < atoi(words[2]); round++) {
			pthread_barrier_wait(&begun);
			for (volatile int left = rand_r(&random) % PAUSE_MAX; left > 0; left--)
				;
			KINDS[kind].change(path, round);
			pthread_barrier_wait(&ended);
			struct statx kept = look(path, 0);
			stale += !same(kept, look(path, AT_STATX_FORCE_SYNC));
		}
		printf("%s: %d of %s\n", KINDS[kind].name, stale, words[2]);
		all += stale;
	}
	over = 1;
	pthread_barrier_wait(&begun);
	for (size_t n = 0; n < READERS; n++)
		pthread_join(readers[n], NULL);
	return all > 0;
}
