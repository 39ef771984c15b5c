//! Sizes as people write them: `4096`, `64K`, `4G`; K, M, G and T are binary (1024).

use std::fmt;

/// Reads a size in bytes. The message on failure says what a size looks like.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let suffix = &text[digits.len()..];
    let shift = match suffix.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return Err(format!("not a size: write a number with K, M, G or T (binary), as in {EXAMPLE}")),
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    if !is_number {
        return Err(format!("not a size: write a whole number, as in {EXAMPLE}"));
    }
    let number: u64 = digits.parse().map_err(|_| "larger than any pool can be".to_string())?;
    number.checked_mul(1 << shift).ok_or_else(|| "larger than any pool can be".to_string())
}

const EXAMPLE: &str = "512M or 4G";

/// Shows bytes with the largest unit that keeps the number exact to two places.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let unit = (0..UNITS.len() - 1).take_while(|i| self.0 >> (10 * (i + 1)) > 0).count();
        let whole = 1u64 << (10 * unit);
        if self.0.is_multiple_of(whole) {
            write!(f, "{} {}", self.0 / whole, UNITS[unit])
        } else {
            write!(f, "{:.2} {}", self.0 as f64 / whole as f64, UNITS[unit])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_and_exact() {
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("64k"), Ok(64 << 10));
        assert_eq!(parse("512M"), Ok(512 << 20));
        assert_eq!(parse("4G"), Ok(4 << 30));
        assert_eq!(parse("1TiB"), Ok(1 << 40));
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for bad in
            ["", "G", "-1", "4X", "1.5G", "4 G", "0x10", "٤G", "4GG", "99999999999999999999", "16777216T"]
        {
            assert!(parse(bad).is_err(), "{bad:?} was taken for a size");
        }
    }

    #[test]
    fn sizes_are_shown_with_their_unit() {
        for (bytes, shown) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (4096, "4 KiB"),
            (4 << 30, "4 GiB"),
            (3 << 29, "1.50 GiB"),
            (u64::MAX, "16777216.00 TiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), shown);
        }
    }
}
