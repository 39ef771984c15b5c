//! The checksum of two ranges from the checksums of each, without their bytes: for copies whose parts end in any order.

use super::crc_table::POLYNOMIAL;

/// The CRC-32C of `a` and `b` together, from `first` of `a` (whatever it was continued from), and `second` of `b`
/// alone, which has so many bytes.
pub fn crc32c_join(first: u32, second: u32, second_bytes: u64) -> u32 {
    product(power_of_bytes(second_bytes), first) ^ second
}

/// Both modulo the CRC's polynomial, bits reversed: the highest is the coefficient of x^0.
fn product(a: u32, mut b: u32) -> u32 {
    let mut sum = 0;
    for bit in (0..32).rev() {
        if a >> bit & 1 == 1 {
            sum ^= b;
        }
        b = if b & 1 == 1 { (b >> 1) ^ POLYNOMIAL } else { b >> 1 };
    }
    sum
}

/// x^(8 * bytes).
fn power_of_bytes(mut bytes: u64) -> u32 {
    let (mut power, mut square) = (1 << 31, 1 << (31 - 8));
    while bytes > 0 {
        if bytes & 1 == 1 {
            power = product(power, square);
        }
        square = product(square, square);
        bytes >>= 1;
    }
    power
}

#[cfg(test)]
mod tests {
    use super::super::crc32c;
    use super::*;

    #[test]
    fn joined_checksums_are_those_of_the_whole() {
        let bytes: Vec<u8> = (0..5000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for seed in [0, 1, 0xdead_beef] {
            for cut in [0, 1, 7, 64, 4096, 4999, 5000] {
                let (a, b) = bytes.split_at(cut);
                let joined = crc32c_join(crc32c(a, seed), crc32c(b, 0), b.len() as u64);
                assert_eq!(joined, crc32c(&bytes, seed), "{seed:#x}, cut at {cut}");
            }
        }
    }
}
