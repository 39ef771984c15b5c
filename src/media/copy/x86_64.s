# Every instruction that loads or stores media on x86-64.
#
# A fault inside [lode_media_begin, lode_media_end) returns at once: the handler puts the fault address
# into rdx and the instruction pointer onto a bare `ret` (or `vzeroupper; ret` from lode_media_vex_begin
# on). So every routine here is a leaf that never moves the stack pointer, keeps to the registers that
# the System V ABI lets a callee destroy, and returns with rdx = 0 when all went well.
#
# Arguments: rdi destination, rsi source, rdx bytes, ecx CRC state, as far as a routine has them.

.section .text.lode_media, "ax", @progbits

.macro ROUTINE name
    .globl \name
    .hidden \name
    .type \name, @function
    .p2align 6
\name:
    .cfi_startproc
.endm

.macro END name
    .cfi_endproc
    .size \name, . - \name
.endm

.macro MARK name
    .globl \name
    .hidden \name
\name:
.endm

MARK lode_media_begin

# ---- Words and write-back: the same for every instruction set ----

ROUTINE lode_load64
    mov rax, [rdi]
    xor edx, edx
    ret
END lode_load64

ROUTINE lode_store64
    mov [rdi], rsi
    xor edx, edx
    ret
END lode_store64

# rdi line; rax rcx rdx rsi r8 r9 r10 r11 its words. From registers: what was stored a moment ago, read back in
# another width, would wait for every store before it.
.macro STORE_LINE name, store
ROUTINE \name
    \store [rdi], rax
    \store [rdi + 8], rcx
    \store [rdi + 16], rdx
    \store [rdi + 24], rsi
    \store [rdi + 32], r8
    \store [rdi + 40], r9
    \store [rdi + 48], r10
    \store [rdi + 56], r11
    xor edx, edx
    ret
END \name
.endm

STORE_LINE lode_line_nt, movnti
STORE_LINE lode_line_cached, mov

# rdi start, rsi bytes (at least one): each line that the range touches.
.macro WRITE_BACK name, instruction
ROUTINE \name
    lea rsi, [rdi + rsi - 1]
    and rdi, -64
2:  \instruction byte ptr [rdi]
    add rdi, 64
    cmp rdi, rsi
    jbe 2b
    xor edx, edx
    ret
END \name
.endm

WRITE_BACK lode_clwb, clwb
WRITE_BACK lode_clflushopt, clflushopt
WRITE_BACK lode_clflush, clflush

# ---- Copies through the cache ----

# Up to 64 bytes, then returns; falls through for more. Loads before it stores, so that the two ends may
# overlap.
.macro COPY_SMALL
    cmp rdx, 64
    ja 64f
    cmp edx, 16
    jae 16f
    cmp edx, 8
    jae 8f
    cmp edx, 4
    jae 4f
    test edx, edx
    jz 1f
    mov ecx, edx
    shr ecx, 1
    movzx eax, byte ptr [rsi]
    movzx r8d, byte ptr [rsi + rcx]
    movzx r9d, byte ptr [rsi + rdx - 1]
    mov [rdi], al
    mov [rdi + rcx], r8b
    mov [rdi + rdx - 1], r9b
1:  xor edx, edx
    ret
4:  mov eax, [rsi]
    mov ecx, [rsi + rdx - 4]
    mov [rdi], eax
    mov [rdi + rdx - 4], ecx
    xor edx, edx
    ret
8:  mov rax, [rsi]
    mov rcx, [rsi + rdx - 8]
    mov [rdi], rax
    mov [rdi + rdx - 8], rcx
    xor edx, edx
    ret
16: cmp edx, 32
    ja 32f
    movdqu xmm0, [rsi]
    movdqu xmm1, [rsi + rdx - 16]
    movdqu [rdi], xmm0
    movdqu [rdi + rdx - 16], xmm1
    xor edx, edx
    ret
32: movdqu xmm0, [rsi]
    movdqu xmm1, [rsi + 16]
    movdqu xmm2, [rsi + rdx - 32]
    movdqu xmm3, [rsi + rdx - 16]
    movdqu [rdi], xmm0
    movdqu [rdi + 16], xmm1
    movdqu [rdi + rdx - 32], xmm2
    movdqu [rdi + rdx - 16], xmm3
    xor edx, edx
    ret
64:
.endm

# One line as `set` of registers (0 to 3), at \base + \offset. LOAD is unaligned, STORE too, STREAM
# bypasses the cache and needs an aligned address.

.macro LINE_SSE2 op, set, base, offset=0
  .if \set == 0
    \op\()_XMM 0, 1, 2, 3, \base, \offset
  .elseif \set == 1
    \op\()_XMM 4, 5, 6, 7, \base, \offset
  .elseif \set == 2
    \op\()_XMM 8, 9, 10, 11, \base, \offset
  .else
    \op\()_XMM 12, 13, 14, 15, \base, \offset
  .endif
.endm
.macro LOAD_XMM a, b, c, d, base, offset
    movdqu xmm\a, [\base + \offset]
    movdqu xmm\b, [\base + \offset + 16]
    movdqu xmm\c, [\base + \offset + 32]
    movdqu xmm\d, [\base + \offset + 48]
.endm
.macro STORE_XMM a, b, c, d, base, offset
    movdqu [\base + \offset], xmm\a
    movdqu [\base + \offset + 16], xmm\b
    movdqu [\base + \offset + 32], xmm\c
    movdqu [\base + \offset + 48], xmm\d
.endm
.macro STREAM_XMM a, b, c, d, base, offset
    movntdq [\base + \offset], xmm\a
    movntdq [\base + \offset + 16], xmm\b
    movntdq [\base + \offset + 32], xmm\c
    movntdq [\base + \offset + 48], xmm\d
.endm

.macro LINE_AVX2 op, set, base, offset=0
  .if \set == 0
    \op\()_YMM 0, 1, \base, \offset
  .elseif \set == 1
    \op\()_YMM 2, 3, \base, \offset
  .elseif \set == 2
    \op\()_YMM 4, 5, \base, \offset
  .else
    \op\()_YMM 6, 7, \base, \offset
  .endif
.endm
.macro LOAD_YMM a, b, base, offset
    vmovdqu ymm\a, [\base + \offset]
    vmovdqu ymm\b, [\base + \offset + 32]
.endm
.macro STORE_YMM a, b, base, offset
    vmovdqu [\base + \offset], ymm\a
    vmovdqu [\base + \offset + 32], ymm\b
.endm
.macro STREAM_YMM a, b, base, offset
    vmovntdq [\base + \offset], ymm\a
    vmovntdq [\base + \offset + 32], ymm\b
.endm

.macro LINE_AVX512 op, set, base, offset=0
    \op\()_ZMM \set, \base, \offset
.endm
.macro LOAD_ZMM a, base, offset
    vmovdqu64 zmm\a, [\base + \offset]
.endm
.macro STORE_ZMM a, base, offset
    vmovdqu64 [\base + \offset], zmm\a
.endm
.macro STREAM_ZMM a, base, offset
    vmovntdq [\base + \offset], zmm\a
.endm

.macro LEAVE_SSE2
    xor edx, edx
    ret
.endm
.macro LEAVE_AVX2
    vzeroupper
    xor edx, edx
    ret
.endm
.macro LEAVE_AVX512
    vzeroupper
    xor edx, edx
    ret
.endm

# Any alignment and length. The last line is unaligned, and loaded last: asked for early it turns the fetching ahead of Zen 4 the
# wrong way (decision 0093).
.macro COPY name, isa
ROUTINE \name
    COPY_SMALL
    # Aligned stores from here on, behind one unaligned line.
    LINE_\isa LOAD, 0, rsi
    LINE_\isa STORE, 0, rdi
    mov rcx, rdi
    neg rcx
    and ecx, 63
    add rdi, rcx
    add rsi, rcx
    sub rdx, rcx
    cmp rdx, 128
    jbe 3f
2:  LINE_\isa LOAD, 0, rsi
    LINE_\isa LOAD, 1, rsi, 64
    LINE_\isa STORE, 0, rdi
    LINE_\isa STORE, 1, rdi, 64
    add rsi, 128
    add rdi, 128
    sub rdx, 128
    cmp rdx, 128
    ja 2b
3:  LINE_\isa LOAD, 1, rsi + rdx, -64
    cmp rdx, 64
    jbe 4f
    LINE_\isa LOAD, 0, rsi
    LINE_\isa STORE, 0, rdi
4:  LINE_\isa STORE, 1, rdi + rdx, -64
    LEAVE_\isa
END \name
.endm

# ---- Whole lines around the cache: rdi aligned to 64, rdx a multiple of 64 and not zero ----

# At the first step of a page: fetches a line near the end of the page after the next, and with it the page's translation, for
# stores wait for each page's walk, and nothing looks ahead for them. The line is gone long before it is stored.
# \rest: what is left is this much more than rdx.
.macro PAGE_AHEAD step, rest
    test edi, 4096 - \step
    jnz 41f
    cmp rdx, 3 * 4096 - \rest
    jb 41f
    prefetchnta [rdi + 3 * 4096 - 512]
41:
.endm

.macro COPY_LINES name, isa
ROUTINE \name
    sub rdx, 256
    jb 3f
2:  PAGE_AHEAD 256, 256
    LINE_\isa LOAD, 0, rsi
    LINE_\isa LOAD, 1, rsi, 64
    LINE_\isa LOAD, 2, rsi, 128
    LINE_\isa LOAD, 3, rsi, 192
    LINE_\isa STREAM, 0, rdi
    LINE_\isa STREAM, 1, rdi, 64
    LINE_\isa STREAM, 2, rdi, 128
    LINE_\isa STREAM, 3, rdi, 192
    add rsi, 256
    add rdi, 256
    sub rdx, 256
    jae 2b
3:  add edx, 256
    jz 5f
4:  LINE_\isa LOAD, 0, rsi
    LINE_\isa STREAM, 0, rdi
    add rsi, 64
    add rdi, 64
    sub edx, 64
    jnz 4b
5:  LEAVE_\isa
END \name
.endm

# rsi bytes.
.macro ZERO_LINES name, isa, clear
ROUTINE \name
    \clear
2:  LINE_\isa STREAM, 0, rdi
    add rdi, 64
    sub rsi, 64
    jnz 2b
    LEAVE_\isa
END \name
.endm
.macro CLEAR_SSE2
    pxor xmm0, xmm0
    pxor xmm1, xmm1
    pxor xmm2, xmm2
    pxor xmm3, xmm3
.endm
.macro CLEAR_AVX2
    vpxor xmm0, xmm0, xmm0
    vpxor xmm1, xmm1, xmm1
.endm
.macro CLEAR_AVX512
    vpxor xmm0, xmm0, xmm0
.endm

# ---- Reads of N adjacent spans side by side: rdx bytes per span, a multiple of 64 and not zero ----

ROUTINE lode_read_1
    mov rcx, rdx
    rep movsb
    xor edx, edx
    ret
END lode_read_1

.macro MOVE_LINE isa
    LINE_\isa LOAD, 0, rsi
    LINE_\isa STORE, 0, rdi
    add rsi, 64
    add rdi, 64
.endm

.macro READ_1_AHEAD name, isa
ROUTINE \name
2:  prefetcht0 [rsi + 8192]
    mov eax, 4096
    cmp rdx, rax
    cmovb rax, rdx
    sub rdx, rax
3:  MOVE_LINE \isa
    sub eax, 64
    jnz 3b
    test rdx, rdx
    jnz 2b
    LEAVE_\isa
END \name
.endm

.macro READ_1_BURST name, isa
ROUTINE \name
    mov ecx, 4096
    cmp rdx, rcx
    cmovb rcx, rdx
    xor eax, eax
2:  prefetcht0 [rsi + rax]
    add eax, 64
    cmp eax, ecx
    jb 2b
    sub rdx, rcx
    jz 4f
3:  prefetcht0 [rsi + 4096]
    MOVE_LINE \isa
    sub rdx, 64
    jnz 3b
4:  MOVE_LINE \isa
    sub ecx, 64
    jnz 4b
    LEAVE_\isa
END \name
.endm

.macro READ_4 name, isa, ahead=0
ROUTINE \name
    lea rcx, [rdx + rdx*2]
    mov rax, rdx
2:
  .if \ahead
    prefetcht1 [rsi + 4096]
    prefetcht1 [rsi + rdx + 4096]
    prefetcht1 [rsi + rdx*2 + 4096]
    prefetcht1 [rsi + rcx + 4096]
  .endif
    LINE_\isa LOAD, 0, rsi
    LINE_\isa LOAD, 1, rsi + rdx
    LINE_\isa LOAD, 2, rsi + rdx*2
    LINE_\isa LOAD, 3, rsi + rcx
    LINE_\isa STORE, 0, rdi
    LINE_\isa STORE, 1, rdi + rdx
    LINE_\isa STORE, 2, rdi + rdx*2
    LINE_\isa STORE, 3, rdi + rcx
    add rsi, 64
    add rdi, 64
    sub rax, 64
    jnz 2b
    LEAVE_\isa
END \name
.endm

.macro READ_8 name, isa
ROUTINE \name
    lea rcx, [rdx + rdx*2]
    lea r8, [rdx + rdx*4]
    lea r9, [rcx + rdx*4]
    mov rax, rdx
2:  LINE_\isa LOAD, 0, rsi
    LINE_\isa LOAD, 1, rsi + rdx
    LINE_\isa LOAD, 2, rsi + rdx*2
    LINE_\isa LOAD, 3, rsi + rcx
    LINE_\isa STORE, 0, rdi
    LINE_\isa STORE, 1, rdi + rdx
    LINE_\isa STORE, 2, rdi + rdx*2
    LINE_\isa STORE, 3, rdi + rcx
    LINE_\isa LOAD, 0, rsi + rdx*4
    LINE_\isa LOAD, 1, rsi + r8
    LINE_\isa LOAD, 2, rsi + rcx*2
    LINE_\isa LOAD, 3, rsi + r9
    LINE_\isa STORE, 0, rdi + rdx*4
    LINE_\isa STORE, 1, rdi + r8
    LINE_\isa STORE, 2, rdi + rcx*2
    LINE_\isa STORE, 3, rdi + r9
    add rsi, 64
    add rdi, 64
    sub rax, 64
    jnz 2b
    LEAVE_\isa
END \name
.endm

# ---- CRC-32C ----
#
# A 128-bit block b is carried d bytes ahead by two carry-less products, of its halves with x^(8d+63)
# and x^(8d-1) mod P (bit-reversed: see `fold.rs`, which computes the table). Four accumulators of one
# vector each are carried past each other in the loop, and all are carried to the end of the range at
# last, where two crc32 instructions reduce what is left. A range that is no multiple of four vectors
# begins with accumulators of zero, which count for nothing.

# The crc of rdx bytes (less than 64 count) at rsi, byte-wise state in eax.
.macro CRC_TAIL
    test edx, 32
    jz 1f
    crc32 rax, qword ptr [rsi]
    crc32 rax, qword ptr [rsi + 8]
    crc32 rax, qword ptr [rsi + 16]
    crc32 rax, qword ptr [rsi + 24]
    add rsi, 32
1:  test edx, 16
    jz 1f
    crc32 rax, qword ptr [rsi]
    crc32 rax, qword ptr [rsi + 8]
    add rsi, 16
1:  test edx, 8
    jz 1f
    crc32 rax, qword ptr [rsi]
    add rsi, 8
1:  test edx, 4
    jz 1f
    crc32 eax, dword ptr [rsi]
    add rsi, 4
1:  test edx, 2
    jz 1f
    crc32 eax, word ptr [rsi]
    add rsi, 2
1:  test edx, 1
    jz 1f
    crc32 eax, byte ptr [rsi]
1:
.endm

# Loads the first r lines into the last r of the accumulators zmm0..zmm3 (r = lines mod 4, or 4),
# streams them out where \copy is 1, and takes the state in ecx into the first. Leaves the lines that
# remain, a multiple of 4, in rdx as bytes.
.macro CRC_BEGIN_ZMM copy
    vpxor xmm0, xmm0, xmm0
    vpxor xmm1, xmm1, xmm1
    vpxor xmm2, xmm2, xmm2
    vmovd xmm4, ecx
    mov eax, edx
    and eax, 0xc0
    jz 4f
    cmp eax, 0x80
    je 2f
    ja 3f
    FIRST_ZMM 3, 0, \copy
    vpxorq zmm3, zmm3, zmm4
    jmp 5f
2:  FIRST_ZMM 2, 0, \copy
    FIRST_ZMM 3, 64, \copy
    vpxorq zmm2, zmm2, zmm4
    jmp 5f
3:  FIRST_ZMM 1, 0, \copy
    FIRST_ZMM 2, 64, \copy
    FIRST_ZMM 3, 128, \copy
    vpxorq zmm1, zmm1, zmm4
    jmp 5f
4:  FIRST_ZMM 0, 0, \copy
    FIRST_ZMM 1, 64, \copy
    FIRST_ZMM 2, 128, \copy
    FIRST_ZMM 3, 192, \copy
    vpxorq zmm0, zmm0, zmm4
    mov eax, 256
5:  add rsi, rax
  .if \copy
    add rdi, rax
  .endif
    sub rdx, rax
.endm
.macro FIRST_ZMM acc, offset, copy
    vmovdqu64 zmm\acc, [rsi + \offset]
  .if \copy
    vmovntdq [rdi + \offset], zmm\acc
  .endif
.endm

.macro CRC_LOOP_ZMM copy
    vbroadcasti32x4 zmm16, [rip + {fold} + 256]
2:
  .if \copy
    PAGE_AHEAD 256, 0
  .endif
    vmovdqu64 zmm4, [rsi]
    vmovdqu64 zmm5, [rsi + 64]
    vmovdqu64 zmm6, [rsi + 128]
    vmovdqu64 zmm7, [rsi + 192]
  .if \copy
    vmovntdq [rdi], zmm4
    vmovntdq [rdi + 64], zmm5
    vmovntdq [rdi + 128], zmm6
    vmovntdq [rdi + 192], zmm7
    add rdi, 256
  .endif
    vpclmulqdq zmm8, zmm0, zmm16, 0x00
    vpclmulqdq zmm0, zmm0, zmm16, 0x11
    vpclmulqdq zmm9, zmm1, zmm16, 0x00
    vpclmulqdq zmm1, zmm1, zmm16, 0x11
    vpclmulqdq zmm10, zmm2, zmm16, 0x00
    vpclmulqdq zmm2, zmm2, zmm16, 0x11
    vpclmulqdq zmm11, zmm3, zmm16, 0x00
    vpclmulqdq zmm3, zmm3, zmm16, 0x11
    vpternlogq zmm0, zmm8, zmm4, 0x96
    vpternlogq zmm1, zmm9, zmm5, 0x96
    vpternlogq zmm2, zmm10, zmm6, 0x96
    vpternlogq zmm3, zmm11, zmm7, 0x96
    add rsi, 256
    sub rdx, 256
    jnz 2b
.endm

# Carries the four accumulators to the end and reduces them: the state in eax.
.macro CRC_REDUCE_ZMM
    lea rcx, [rip + {fold}]
    vpclmulqdq zmm4, zmm0, [rcx], 0x00
    vpclmulqdq zmm0, zmm0, [rcx], 0x11
    vpclmulqdq zmm5, zmm1, [rcx + 64], 0x00
    vpclmulqdq zmm1, zmm1, [rcx + 64], 0x11
    vpclmulqdq zmm6, zmm2, [rcx + 128], 0x00
    vpclmulqdq zmm2, zmm2, [rcx + 128], 0x11
    vpclmulqdq zmm7, zmm3, [rcx + 192], 0x00
    vpclmulqdq zmm3, zmm3, [rcx + 192], 0x11
    vpternlogq zmm0, zmm4, zmm5, 0x96
    vpternlogq zmm1, zmm2, zmm6, 0x96
    vpternlogq zmm0, zmm3, zmm7, 0x96
    vpxorq zmm0, zmm0, zmm1
    vextracti64x4 ymm1, zmm0, 1
    vpxor ymm0, ymm0, ymm1
    CRC_FINISH_YMM
.endm

# ymm0 to the checksum in rax.
.macro CRC_FINISH_YMM
    vextracti128 xmm1, ymm0, 1
    vpxor xmm0, xmm0, xmm1
    vmovq rcx, xmm0
    vpextrq r8, xmm0, 1
    xor eax, eax
    crc32 rax, rcx
    crc32 rax, r8
.endm

# As with zmm0..zmm3, half as wide: one line or two.
.macro CRC_BEGIN_YMM copy
    vmovd xmm4, ecx
    test edx, 64
    jz 4f
    vpxor xmm0, xmm0, xmm0
    vpxor xmm1, xmm1, xmm1
    FIRST_YMM 2, 3, 0, \copy
    vpxor ymm2, ymm2, ymm4
    mov eax, 64
    jmp 5f
4:  FIRST_YMM 0, 1, 0, \copy
    FIRST_YMM 2, 3, 64, \copy
    vpxor ymm0, ymm0, ymm4
    mov eax, 128
5:  add rsi, rax
  .if \copy
    add rdi, rax
  .endif
    sub rdx, rax
.endm
.macro FIRST_YMM a, b, offset, copy
    LOAD_YMM \a, \b, rsi, \offset
  .if \copy
    STREAM_YMM \a, \b, rdi, \offset
  .endif
.endm

.macro CRC_LOOP_YMM copy
    vbroadcasti128 ymm12, [rip + {fold} + 288]
2:
  .if \copy
    PAGE_AHEAD 128, 0
  .endif
    LOAD_YMM 4, 5, rsi, 0
    LOAD_YMM 6, 7, rsi, 64
  .if \copy
    STREAM_YMM 4, 5, rdi, 0
    STREAM_YMM 6, 7, rdi, 64
    add rdi, 128
  .endif
    vpclmulqdq ymm8, ymm0, ymm12, 0x00
    vpclmulqdq ymm0, ymm0, ymm12, 0x11
    vpclmulqdq ymm9, ymm1, ymm12, 0x00
    vpclmulqdq ymm1, ymm1, ymm12, 0x11
    vpclmulqdq ymm10, ymm2, ymm12, 0x00
    vpclmulqdq ymm2, ymm2, ymm12, 0x11
    vpclmulqdq ymm11, ymm3, ymm12, 0x00
    vpclmulqdq ymm3, ymm3, ymm12, 0x11
    vpxor ymm4, ymm4, ymm8
    vpxor ymm5, ymm5, ymm9
    vpxor ymm6, ymm6, ymm10
    vpxor ymm7, ymm7, ymm11
    vpxor ymm0, ymm0, ymm4
    vpxor ymm1, ymm1, ymm5
    vpxor ymm2, ymm2, ymm6
    vpxor ymm3, ymm3, ymm7
    add rsi, 128
    sub rdx, 128
    jnz 2b
.endm

# By the last two lines of the table.
.macro CRC_REDUCE_YMM
    lea rcx, [rip + {fold} + 128]
  .irp acc, 0, 1, 2, 3
    vmovdqu ymm5, [rcx + 32 * \acc]
    vpclmulqdq ymm4, ymm\acc, ymm5, 0x00
    vpclmulqdq ymm\acc, ymm\acc, ymm5, 0x11
    vpxor ymm\acc, ymm\acc, ymm4
  .endr
    vpxor ymm0, ymm0, ymm1
    vpxor ymm2, ymm2, ymm3
    vpxor ymm0, ymm0, ymm2
    CRC_FINISH_YMM
.endm

.macro CRC_BEGIN_XMM copy
    movd xmm4, ecx
    movdqu xmm0, [rsi]
    movdqu xmm1, [rsi + 16]
    movdqu xmm2, [rsi + 32]
    movdqu xmm3, [rsi + 48]
  .if \copy
    STREAM_XMM 0, 1, 2, 3, rdi, 0
    add rdi, 64
  .endif
    pxor xmm0, xmm4
    add rsi, 64
    sub rdx, 64
.endm

.macro CRC_LOOP_XMM copy
    movdqu xmm12, [rip + {fold} + 272]
2:
  .if \copy
    PAGE_AHEAD 64, 0
  .endif
    LINE_SSE2 LOAD, 2, rsi
  .if \copy
    LINE_SSE2 STREAM, 2, rdi
    add rdi, 64
  .endif
  .irp acc, 0, 1, 2, 3
    movdqa xmm4, xmm\acc
    pclmulqdq xmm4, xmm12, 0x00
    pclmulqdq xmm\acc, xmm12, 0x11
    pxor xmm\acc, xmm4
  .endr
    pxor xmm0, xmm8
    pxor xmm1, xmm9
    pxor xmm2, xmm10
    pxor xmm3, xmm11
    add rsi, 64
    sub rdx, 64
    jnz 2b
.endm

# Carries one line to the end, by the last line of the table.
.macro CRC_REDUCE_XMM
    lea rcx, [rip + {fold} + 192]
  .irp acc, 0, 1, 2, 3
    movdqu xmm5, [rcx + 16 * \acc]
    movdqa xmm4, xmm\acc
    pclmulqdq xmm4, xmm5, 0x00
    pclmulqdq xmm\acc, xmm5, 0x11
    pxor xmm\acc, xmm4
  .endr
    pxor xmm0, xmm1
    pxor xmm2, xmm3
    pxor xmm0, xmm2
    movq rcx, xmm0
    pextrq r8, xmm0, 1
    xor eax, eax
    crc32 rax, rcx
    crc32 rax, r8
.endm

.macro COPY_LINES_CRC name, isa, vector
ROUTINE \name
    CRC_BEGIN_\vector 1
    test rdx, rdx
    jz 9f
    CRC_LOOP_\vector 1
9:  CRC_REDUCE_\vector
    LEAVE_\isa
END \name
.endm

# rdi source, rsi bytes, edx state.
.macro CRC name, isa, vector, bytes_min
ROUTINE \name
    mov rcx, rdx
    mov rdx, rsi
    mov rsi, rdi
    mov eax, ecx
    cmp rdx, \bytes_min
    jb 8f
    mov r9, rdx
    and rdx, -64
    CRC_BEGIN_\vector 0
    test rdx, rdx
    jz 7f
    CRC_LOOP_\vector 0
7:  CRC_REDUCE_\vector
    mov edx, r9d
    and edx, 63
    CRC_TAIL
    LEAVE_\isa
8:  cmp rdx, 64
    jb 9f
    crc32 rax, qword ptr [rsi]
    crc32 rax, qword ptr [rsi + 8]
    crc32 rax, qword ptr [rsi + 16]
    crc32 rax, qword ptr [rsi + 24]
    crc32 rax, qword ptr [rsi + 32]
    crc32 rax, qword ptr [rsi + 40]
    crc32 rax, qword ptr [rsi + 48]
    crc32 rax, qword ptr [rsi + 56]
    add rsi, 64
    sub rdx, 64
    jmp 8b
9:  CRC_TAIL
    xor edx, edx
    ret
END \name
.endm

COPY lode_copy_sse2, SSE2
COPY_LINES lode_copy_lines_sse2, SSE2
ZERO_LINES lode_zero_lines_sse2, SSE2, CLEAR_SSE2
READ_1_AHEAD lode_read_1_ahead_sse2, SSE2
READ_1_BURST lode_read_1_burst_sse2, SSE2
READ_4 lode_read_4_sse2, SSE2
READ_4 lode_read_4_ahead_sse2, SSE2, 1
READ_8 lode_read_8_sse2, SSE2
COPY_LINES_CRC lode_copy_lines_crc_sse42, SSE2, XMM
CRC lode_crc_sse42, SSE2, XMM, 256

MARK lode_media_vex_begin

COPY lode_copy_avx2, AVX2
COPY_LINES lode_copy_lines_avx2, AVX2
ZERO_LINES lode_zero_lines_avx2, AVX2, CLEAR_AVX2
READ_1_AHEAD lode_read_1_ahead_avx2, AVX2
READ_1_BURST lode_read_1_burst_avx2, AVX2
READ_4 lode_read_4_avx2, AVX2
READ_4 lode_read_4_ahead_avx2, AVX2, 1
READ_8 lode_read_8_avx2, AVX2
COPY_LINES_CRC lode_copy_lines_crc_avx2, AVX2, YMM
CRC lode_crc_avx2, AVX2, YMM, 128

COPY lode_copy_avx512, AVX512
COPY_LINES lode_copy_lines_avx512, AVX512
ZERO_LINES lode_zero_lines_avx512, AVX512, CLEAR_AVX512
READ_1_AHEAD lode_read_1_ahead_avx512, AVX512
READ_1_BURST lode_read_1_burst_avx512, AVX512
READ_4 lode_read_4_avx512, AVX512
READ_4 lode_read_4_ahead_avx512, AVX512, 1
READ_8 lode_read_8_avx512, AVX512
COPY_LINES_CRC lode_copy_lines_crc_avx512, AVX512, ZMM
CRC lode_crc_avx512, AVX512, ZMM, 128

MARK lode_media_end

# Where a routine goes on after a fault.
ROUTINE lode_media_fault
    ret
END lode_media_fault
ROUTINE lode_media_vex_fault
    vzeroupper
    ret
END lode_media_vex_fault

.text
