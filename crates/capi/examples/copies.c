/*
 * copies FILE [TEXT...]: a log with a format of its own on slow memory, its bytes moved by Lodestone's copies.
 *
 *     cc copies.c -o copies $(pkg-config --cflags --libs lodestone)
 *     ./copies /tmp/copies.log one two three
 *
 * An entry is a head of 8 bytes (CRC-32C of the text, its length) and the text. An entry that a crash tore does not match
 * its checksum, and ends the log.
 */
#include <lodestone.h>
#include <stdlib.h>
#include <string.h>

enum { LOG_BYTES = 1 << 20, TEXT_BYTES_MAX = 4096 };

struct head {
    uint32_t crc, bytes;
};

static void give_up(void)
{
    fprintf(stderr, "copies: %s\n", lode_last_error());
    exit(1);
}

/* The entry at an offset: 1, or 0 at the end of the log. */
static int read_entry(lode_media *media, uint64_t at, struct head *head, char *text)
{
    uint32_t crc = 0;
    if (at + sizeof *head > LOG_BYTES)
        return 0;
    if (lode_copy_from_media(media, at, head, sizeof *head, 0, NULL) < 0)
        give_up();
    if (head->bytes == 0 || head->bytes > TEXT_BYTES_MAX || at + sizeof *head + head->bytes > LOG_BYTES)
        return 0;
    if (lode_copy_from_media(media, at + sizeof *head, text, head->bytes, 0, &crc) < 0)
        give_up();
    return crc == head->crc;
}

/* The text goes first, its checksum computed on the way; then the head, with which both are durable. */
static void append(lode_media *media, uint64_t at, const char *text, uint32_t bytes)
{
    struct head head = {0, bytes};
    lode_ticket ticket = lode_copy_to_media_async(media, at + sizeof head, text, bytes, 0, &head.crc);
    if (ticket < 0)
        give_up();
    /* Something else could be done here; the text stays as it is. */
    if (lode_media_wait(media, ticket, &head.crc) < 0)
        give_up();
    if (lode_copy_to_media(media, at, &head, sizeof head, LODE_COPY_DURABLE, NULL) < 0)
        give_up();
}

int main(int argc, char **argv)
{
    static char text[TEXT_BYTES_MAX + 1];
    struct head head;
    uint64_t at = 0;
    int entries = 0;

    if (argc < 2) {
        fprintf(stderr, "usage: copies FILE [TEXT...]\n");
        return 2;
    }
    lode_media *media = lode_media_open(argv[1], "size=1048576,engine=delegate");
    if (!media)
        give_up();
    for (; read_entry(media, at, &head, text); entries++) {
        printf("%.*s\n", (int)head.bytes, text);
        at += sizeof head + head.bytes;
    }
    for (int i = 2; i < argc; i++, entries++) {
        size_t bytes = strlen(argv[i]);
        if (bytes == 0 || bytes > TEXT_BYTES_MAX || at + sizeof head + bytes > LOG_BYTES) {
            fprintf(stderr, "copies: no room for '%s'\n", argv[i]);
            return 1;
        }
        append(media, at, argv[i], (uint32_t)bytes);
        at += sizeof head + bytes;
    }
    printf("%d entries, durable by %s\n", entries, lode_media_domain(media));
    if (lode_media_close(media) < 0)
        give_up();
    return 0;
}
