//! Text from a seed: words for snappy, lines of a log for grep.

use crate::bench::Random;

/// Different words, how many of them are common, and how many of eight words in a row are of these.
const WORDS: u64 = 1900;
const COMMON_WORDS: u64 = 100;
const COMMON_IN_8: u64 = 5;
const WORD_BYTES: (u64, u64) = (3, 9);

/// Words with blanks between them, as compressible as prose.
pub fn words(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let words: Vec<Vec<u8>> = (0..WORDS).map(|_| word(&mut random)).collect();
    let mut text = Vec::with_capacity(bytes + 16);
    while text.len() < bytes {
        let among = if random.below(8) < COMMON_IN_8 { COMMON_WORDS } else { WORDS };
        text.extend_from_slice(&words[random.below(among) as usize]);
        text.push(b' ');
    }
    text.truncate(bytes);
    text
}

fn word(random: &mut Random) -> Vec<u8> {
    let (least, most) = WORD_BYTES;
    let len = least + random.below(most - least + 1);
    (0..len).map(|_| b'a' + random.below(26) as u8).collect()
}

/// Of seven lines in eight; the others warn, or tell of an error.
const OTHER_LEVELS: [&str; 4] = ["debug", "info", "info", "info"];
const AGENT: &str = "agent=\"Mozilla/5.0 (X11; Linux x86_64; rv:115.0) Gecko/20100101 Firefox/115.0\"";
const STATUSES: [u32; 8] = [200, 200, 200, 200, 301, 304, 404, 503];

/// Lines of a server's log, ended by a newline each; the last one may be cut short.
pub fn log_lines(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut text = Vec::with_capacity(bytes + 256);
    let mut time = 1_700_000_000_000u64;
    while text.len() < bytes {
        time += random.below(40);
        let level = match random.below(16) {
            0 => "error",
            1 => "warn",
            _ => OTHER_LEVELS[random.below(4) as usize],
        };
        let status = STATUSES[random.below(8) as usize];
        let (client, took, page) = (random.below(1 << 16), random.below(400), random.below(5000));
        let line = format!(
            "{time} level={level} client=10.0.{}.{} method=GET path=/site/page/{page}.html status={status} took={took}ms {AGENT}\n",
            client >> 8,
            client & 255
        );
        text.extend_from_slice(line.as_bytes());
    }
    text.truncate(bytes);
    text
}
