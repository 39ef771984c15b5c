//! CRC-32C by table: for processors without a crc32 instruction, and the reference of the tests.
//!
//! Here and in the routines a *state* is the register of the shift circuit, without the usual
//! complement before and after; [`super::crc32c`] adds that.

/// The Castagnoli polynomial, bits reversed.
pub(super) const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut state = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            state = if state & 1 == 1 { (state >> 1) ^ POLYNOMIAL } else { state >> 1 };
            bit += 1;
        }
        table[byte] = state;
        byte += 1;
    }
    table
};

pub(super) fn update(state: u32, bytes: impl Iterator<Item = u8>) -> u32 {
    bytes.fold(state, |state, byte| (state >> 8) ^ TABLE[((state as u8) ^ byte) as usize])
}

#[cfg(test)]
mod tests {
    #[test]
    fn known_answer() {
        // The check value of CRC-32C in the catalogue of CRC algorithms.
        assert_eq!(!super::update(!0, b"123456789".iter().copied()), 0xe306_9283);
    }
}
