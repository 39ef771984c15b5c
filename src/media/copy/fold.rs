//! The constants by which the assembly carries CRC-32C ahead with carry-less products.
//!
//! The registers hold polynomials bit-reversed: bit i of a 64-bit half is the coefficient of x^(63-i),
//! and the product of two halves, read as 128 reversed bits, is x times their product. To carry a
//! 128-bit block ahead by `d` bits its first half, which stands 64 bits higher, is therefore multiplied
//! by x^(d+63) and its second by x^(d-1), both modulo the CRC's polynomial. Only the residue counts, so
//! that d = 0 works as well, with x^-1.

use super::crc_table::POLYNOMIAL;

/// Factors for the two halves of a block.
type Factors = [u64; 2];

/// The assembly knows the offsets.
#[repr(C, align(64))]
pub(super) struct FoldTable {
    /// Four lines of four blocks: from its place in the last 256 bytes, each block to their end.
    to_end: [[Factors; 4]; 4],
    /// Past 256 bytes: four vectors of 64 bytes.
    past_256: Factors,
    /// Past 64 bytes: four vectors of 16 bytes.
    past_64: Factors,
    /// Past 128 bytes: four vectors of 32 bytes.
    past_128: Factors,
}

const _: () = {
    assert!(std::mem::offset_of!(FoldTable, to_end) == 0);
    assert!(std::mem::offset_of!(FoldTable, past_256) == 256);
    assert!(std::mem::offset_of!(FoldTable, past_64) == 272);
    assert!(std::mem::offset_of!(FoldTable, past_128) == 288);
};

pub(super) static FOLD: FoldTable = {
    let mut to_end = [[[0; 2]; 4]; 4];
    let mut block = 0;
    while block < 16 {
        to_end[block / 4][block % 4] = factors(16 * (15 - block as u32));
        block += 1;
    }
    FoldTable { to_end, past_256: factors(256), past_64: factors(64), past_128: factors(128) }
};

const fn factors(bytes: u32) -> Factors {
    let bits = 8 * bytes;
    // x^(bits-1): one step short of x^bits, taken from x^-1 on.
    [power(bits + 64), power(bits)]
}

/// x^(n-1) modulo the polynomial, bit-reversed into the upper half of a 64-bit word.
const fn power(n: u32) -> u64 {
    // x^-1: what one step turns into x^0, whose reversal is the highest bit.
    let mut residue = (((1 << 31) ^ POLYNOMIAL) << 1) | 1;
    let mut i = 0;
    while i < n {
        residue = if residue & 1 == 1 { (residue >> 1) ^ POLYNOMIAL } else { residue >> 1 };
        i += 1;
    }
    (residue as u64) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_begin_below_one() {
        assert_eq!(power(1) >> 32, 1 << 31, "x^0");
        assert_eq!(power(2) >> 32, 1 << 30, "x^1");
        assert_eq!(power(33) >> 32, u64::from(POLYNOMIAL), "x^32 is the polynomial's lower part");
    }
}
