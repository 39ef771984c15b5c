//! AES: reads a file, encrypts it by AES-256 in CBC mode, writes a new file (crates aes and cbc).
//!
//! CBC, because there each block waits for the one before it: encryption dominates, as EasyIO §6.3 says of it. Keys and
//! vectors come from a number here; nothing is kept secret.

use aes::Aes256;
use aes::cipher::block_padding::NoPadding;
use aes::cipher::{BlockModeEncrypt, KeyIvInit};
use lodestone::Result;

use super::app::{App, Desk, Shelf, input, malformed, output, take_outputs, write_inputs};
use crate::bench::Random;

const DIR: &str = "/aes";
/// Of EasyIO's Table 1: what is read, and what is written. A multiple of 16.
const FILE_BYTES: usize = 64 << 10;
const INPUTS: usize = 32;
const KEY: [u8; 32] = *b"32 bytes that everybody can read";

pub struct Aes {
    inputs: Vec<Vec<u8>>,
}

impl Aes {
    /// With files of a `shrink`th of the size.
    pub fn new(shrink: usize) -> Aes {
        let file = |n| {
            let mut random = Random::new(n as u64 + 1);
            (0..FILE_BYTES / shrink).map(|_| random.below(256) as u8).collect()
        };
        Aes { inputs: (0..INPUTS).map(file).collect() }
    }
}

/// Encrypts whole blocks.
fn encrypt(key: &[u8; 32], vector: &[u8; 16], plain: &[u8], to: &mut Vec<u8>) -> Result<()> {
    to.resize(plain.len(), 0);
    let encryptor = cbc::Encryptor::<Aes256>::new(key.into(), vector.into());
    encryptor.encrypt_padded_b2b::<NoPadding>(plain, to).map_err(malformed)?;
    Ok(())
}

/// Of item `n`.
fn vector(n: usize) -> [u8; 16] {
    u128::from(n as u64).to_le_bytes()
}

impl App for Aes {
    fn prepare(&self, shelf: &Shelf, _items: usize) -> Result<()> {
        write_inputs(shelf, DIR, &self.inputs)
    }

    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64> {
        desk.read(shelf, &input(DIR, n % INPUTS))?;
        encrypt(&KEY, &vector(n), &desk.input, &mut desk.output)?;
        desk.write_new(shelf, &output(DIR, n))?;
        Ok(desk.output.len() as u64)
    }

    fn collect(&self, shelf: &Shelf, desk: &mut Desk, items: usize) -> Result<u64> {
        take_outputs(shelf, desk, DIR, items)
    }
}

#[cfg(test)]
mod tests {
    use aes::cipher::BlockModeDecrypt;

    use super::super::bed::Bed;
    use super::*;

    fn bytes<const N: usize>(hex: &str) -> [u8; N] {
        std::array::from_fn(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).unwrap())
    }

    /// NIST SP 800-38A, F.2.5.
    #[test]
    fn the_known_answer_of_nist_comes_out() {
        let key = bytes::<32>("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4");
        let vector = bytes::<16>("000102030405060708090a0b0c0d0e0f");
        let plain = bytes::<64>(concat!(
            "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51",
            "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
        ));
        let cipher = bytes::<64>(concat!(
            "f58c4c04d6e5f1ba779eabfb5f7bfbd69cfc4e967edb808d679f777bc6702c7d",
            "39f23369a9d9bacfa530e26304231461b2eb05e2c39be9fcda6c19078c6a9d1b"
        ));
        let mut out = Vec::new();
        encrypt(&key, &vector, &plain, &mut out).unwrap();
        assert_eq!(out, cipher);
        assert!(encrypt(&key, &vector, &plain[..17], &mut out).is_err(), "not whole blocks");
    }

    #[test]
    fn each_output_decrypts_to_its_input() {
        let (bed, app) = (Bed::new(), Aes::new(4));
        app.prepare(&bed.shelf, INPUTS + 1).unwrap();
        for n in [0, 1, INPUTS] {
            app.work(&bed.shelf, &mut Desk::default(), n).unwrap();
            let mut text = bed.read(&output(DIR, n));
            let decryptor = cbc::Decryptor::<Aes256>::new(&KEY.into(), &vector(n).into());
            let plain = decryptor.decrypt_padded::<NoPadding>(&mut text).unwrap();
            assert_eq!(plain, app.inputs[n % INPUTS]);
        }
    }
}
