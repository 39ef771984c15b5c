//! JPEG: reads a picture, decodes it into RGB, writes a new file (crate zune-jpeg; pictures are made by jpeg-encoder).

use jpeg_encoder::{ColorType, Encoder};
use lodestone::Result;
use zune_core::bytestream::ZCursor;
use zune_jpeg::JpegDecoder;

use super::app::{App, Desk, Shelf, input, malformed, output, take_outputs, write_inputs};
use crate::bench::Random;

const DIR: &str = "/jpeg";
/// Of EasyIO's Table 1: 6.3 MB are written. What is read follows from how the pictures look: 343 KB.
const WIDTH: usize = 1920;
const HEIGHT: usize = 1094;
const QUALITY: u8 = 85;
const INPUTS: usize = 4;
/// Waves of a picture, each with a direction, a length and a colour of its own.
const WAVES: usize = 12;
/// Grain: what a camera adds, of 255.
const GRAIN: u64 = 10;

pub struct Jpeg {
    inputs: Vec<Vec<u8>>,
}

impl Jpeg {
    /// With pictures of a `shrink`th of the height.
    pub fn new(shrink: usize) -> Result<Jpeg> {
        let height = HEIGHT / shrink;
        let file = |n| encode(&picture(n as u64 + 1, WIDTH, height), WIDTH, height);
        Ok(Jpeg { inputs: (0..INPUTS).map(file).collect::<Result<_>>()? })
    }
}

/// RGB, three bytes a pixel.
fn picture(seed: u64, width: usize, height: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut unit = || random.below(1 << 20) as f32 / (1 << 20) as f32;
    let waves: Vec<[f32; 6]> = (0..WAVES)
        .map(|_| {
            let (turn, length, phase) = (unit() * 6.3, 8.0 + 400.0 * unit() * unit(), unit() * 6.3);
            let colour = [unit() * 24.0, unit() * 24.0, unit() * 24.0];
            [turn.cos() / length, turn.sin() / length, phase, colour[0], colour[1], colour[2]]
        })
        .collect();
    let mut grain = Random::new(seed ^ 0x9a17);
    let mut pixels = Vec::with_capacity(width * height * 3);
    for y in 0..height {
        for x in 0..width {
            let mut rgb = [128.0f32; 3];
            for [across, down, phase, colour @ ..] in &waves {
                let height = parabola(x as f32 * across + y as f32 * down + phase);
                rgb.iter_mut().zip(colour).for_each(|(value, colour)| *value += height * colour);
            }
            let grain = grain.below(GRAIN) as f32 - GRAIN as f32 / 2.0;
            pixels.extend(rgb.map(|value| (value + grain).clamp(0.0, 255.0) as u8));
        }
    }
    pixels
}

/// A wave of arcs between -1 and 1, of length 2: cheaper than a sine, and as smooth to look at.
fn parabola(x: f32) -> f32 {
    let within = x - x.floor();
    let arc = 4.0 * within * (1.0 - within);
    if x.floor() as i32 % 2 == 0 { arc } else { -arc }
}

fn encode(pixels: &[u8], width: usize, height: usize) -> Result<Vec<u8>> {
    let mut file = Vec::new();
    let encoder = Encoder::new(&mut file, QUALITY);
    encoder.encode(pixels, width as u16, height as u16, ColorType::Rgb).map_err(malformed)?;
    Ok(file)
}

/// Width and height.
fn decode(file: &[u8], pixels: &mut Vec<u8>) -> Result<(usize, usize)> {
    let mut decoder = JpegDecoder::new(ZCursor::new(file));
    decoder.decode_headers().map_err(|e| malformed(format!("{e:?}")))?;
    let size = decoder.output_buffer_size().and_then(|bytes| Some((bytes, decoder.dimensions()?)));
    let (bytes, dimensions) = size.ok_or_else(|| malformed("a picture without a size"))?;
    pixels.resize(bytes, 0);
    decoder.decode_into(pixels).map_err(|e| malformed(format!("{e:?}")))?;
    Ok(dimensions)
}

impl App for Jpeg {
    fn prepare(&self, shelf: &Shelf, _items: usize) -> Result<()> {
        write_inputs(shelf, DIR, &self.inputs)
    }

    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64> {
        desk.read(shelf, &input(DIR, n % INPUTS))?;
        let (width, height) = decode(&desk.input, &mut desk.output)?;
        desk.write_new(shelf, &output(DIR, n))?;
        Ok((width as u64) << 32 | height as u64)
    }

    fn collect(&self, shelf: &Shelf, desk: &mut Desk, items: usize) -> Result<u64> {
        take_outputs(shelf, desk, DIR, items)
    }
}

#[cfg(test)]
mod tests {
    use super::super::bed::Bed;
    use super::*;

    /// What comes out has the picture's dimensions, is the same each time, and is the picture, as far as JPEG keeps it.
    #[test]
    fn each_output_is_the_picture_that_was_encoded() {
        let (bed, app) = (Bed::new(), Jpeg::new(8).unwrap());
        app.prepare(&bed.shelf, INPUTS + 1).unwrap();
        let height = HEIGHT / 8;
        for n in [0, 1, INPUTS] {
            let size = app.work(&bed.shelf, &mut Desk::default(), n).unwrap();
            assert_eq!(size, (WIDTH as u64) << 32 | height as u64);
            let pixels = bed.read(&output(DIR, n));
            let drawn = picture((n % INPUTS) as u64 + 1, WIDTH, height);
            assert_eq!(pixels.len(), drawn.len());
            let off: u64 = pixels.iter().zip(&drawn).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
            assert!(off / (pixels.len() as u64) < 6, "{} on average", off as f64 / pixels.len() as f64);
        }
        assert_eq!(bed.read(&output(DIR, 0)), bed.read(&output(DIR, INPUTS)));
        assert_ne!(bed.read(&output(DIR, 0)), bed.read(&output(DIR, 1)));
    }

    #[test]
    fn a_damaged_input_is_an_error() {
        assert!(decode(b"no picture at all", &mut Vec::new()).is_err());
        assert!(decode(&[], &mut Vec::new()).is_err());
    }

    #[test]
    fn inputs_have_the_size_of_table_1() {
        let file = encode(&picture(1, WIDTH, HEIGHT), WIDTH, HEIGHT).unwrap();
        assert!((310_000..376_000).contains(&file.len()), "{} bytes", file.len());
    }
}
