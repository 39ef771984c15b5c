/* What the tests of the C interface say with: a check that fails ends the program with its place and the reason. */
#ifndef LODE_TESTS_CHECK_H
#define LODE_TESTS_CHECK_H

#include <errno.h>
#include <lodestone.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned checks;

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        checks++;                                                                                            \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s\n  errno %d, %s\n", __FILE__, __LINE__, #condition, errno,           \
                    lode_last_error());                                                                      \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
/* The call fails with this errno. */
#define FAILS(error, call) CHECK((errno = 0, (call) == -1) && errno == (error))
#define FAILS_NULL(error, call) CHECK((errno = 0, (call) == NULL) && errno == (error))

#endif
