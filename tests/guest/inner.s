# The firmware of a guest within the guest: no BIOS, no kernel, nothing but rounds over its memory.
#
# Each round looks at one word in every cache line of its memory, which must be what the round before stored there, and stores
# another; then it says on the serial line how many rounds there were and how many words were wrong. Where it stands in a round only
# its registers know. So whoever resumes it with memory or registers of another moment, or without one line of what it stored,
# hears of that within two rounds. What lies behind (from END to LOOKED_END) it looks at once, and stores nothing to.

    .set SERIAL, 0x3f8
    .set FIRST, 0x200000
    .set ROUND_AT, 0x100000
    .set STEP, 64
    .set PAGE, 4096
    .set FACTOR, 0x9e3779b1

    .code16
    .globl _start
_start:
    cli
    lgdtl %cs:table - _start
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    ljmpl $8, $protected

    .code32
protected:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $0x8000, %esp
    movw $SERIAL + 3, %dx
    movb $3, %al
    outb %al, %dx
    movl $booted, %esi
    call say

# Round 0 only stores. %ebp: the round, %esi: words that were wrong, %ecx and %edx: the keys of the former round and this one.
    xorl %ebp, %ebp
    xorl %esi, %esi
    movl %ebp, ROUND_AT
    movl $FIRST, %edi
0:  movl %edi, (%edi)
    addl $STEP, %edi
    cmpl $END, %edi
    jb 0b
9:  movl (%edi), %eax
    addl $PAGE, %edi
    cmpl $LOOKED_END, %edi
    jb 9b

round:
    cmpl %ebp, ROUND_AT
    je 1f
    incl %esi
1:  imull $FACTOR, %ebp, %ecx
    incl %ebp
    imull $FACTOR, %ebp, %edx
    movl %ebp, ROUND_AT
    movl $FIRST, %edi
2:  movl %edi, %eax
    xorl %ecx, %eax
    cmpl %eax, (%edi)
    jne wrong
3:  movl %edi, %eax
    xorl %edx, %eax
    movl %eax, (%edi)
    addl $STEP, %edi
    cmpl $END, %edi
    jb 2b
    pushl %esi
    movl $rounds, %esi
    call say
    movl %ebp, %ebx
    call number
    movl $wrongs, %esi
    call say
    popl %ebx
    pushl %ebx
    call number
    movl $line, %esi
    call say
    popl %esi
    jmp round
wrong:
    incl %esi
    jmp 3b

# The text at %esi, to its zero.
say:
    lodsb
    testb %al, %al
    jz 5f
    call put
    jmp say
5:  ret

# %ebx in eight hexadecimal digits.
number:
    movl $8, %ecx
6:  roll $4, %ebx
    movb %bl, %al
    andb $15, %al
    addb $'0', %al
    cmpb $'9', %al
    jbe 7f
    addb $'a' - '9' - 1, %al
7:  call put
    loop 6b
    ret

# %al on the serial line, when that takes it.
put:
    movb %al, %ah
    movw $SERIAL + 5, %dx
8:  inb %dx, %al
    testb $32, %al
    jz 8b
    movb %ah, %al
    movw $SERIAL, %dx
    outb %al, %dx
    ret

booted: .asciz "boot\n"
rounds: .asciz "round "
wrongs: .asciz " wrong "
line:   .asciz "\n"

    .balign 8
gdt:
    .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff
table:
    .word table - gdt - 1
    .long gdt

    .org 0xfff0
    .code16
reset:
    jmp _start
    .org 0x10000
