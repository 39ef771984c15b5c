//! KNN: reads samples from a file and searches a k-d tree, built beforehand, for the nearest neighbours of each; most of
//! these have the class that the sample is given (crate kdtree).

use kdtree::KdTree;
use kdtree::distance::squared_euclidean;
use lodestone::Result;

use super::app::{App, Desk, Shelf, input, malformed, write_inputs};
use crate::bench::Random;

const DIR: &str = "/knn";
/// Of EasyIO's Table 1: what is read.
const FILE_BYTES: usize = 1 << 20;
const INPUTS: usize = 8;
/// A sample: where it lies, and what was recorded there. The paper does not say how large one is, but that copies and
/// computation balance.
const SAMPLE_BYTES: usize = 2 << 10;
const DIMENSIONS: usize = 3;
const POINTS: usize = 4096;
const CLASSES: usize = 8;
const NEIGHBOURS: usize = 3;

type Point = [f64; DIMENSIONS];

pub struct Knn {
    inputs: Vec<Vec<u8>>,
    /// Points, each with its class.
    tree: KdTree<f64, u8, Point>,
}

impl Knn {
    /// With files of a `shrink`th of the size.
    pub fn new(shrink: usize) -> Result<Knn> {
        let mut tree = KdTree::new(DIMENSIONS);
        for (point, class) in points() {
            tree.add(point, class).map_err(malformed)?;
        }
        let file = |n| samples(n as u64 + 1, FILE_BYTES / shrink / SAMPLE_BYTES);
        Ok(Knn { inputs: (0..INPUTS).map(file).collect(), tree })
    }

    fn classify(&self, sample: &Point) -> Result<u8> {
        let near = self.tree.nearest(sample, NEIGHBOURS, &squared_euclidean).map_err(malformed)?;
        Ok(most_frequent(near.into_iter().map(|(_, class)| *class)))
    }
}

/// The smallest of those that are there most often.
fn most_frequent(classes: impl Iterator<Item = u8>) -> u8 {
    let mut votes = [0u8; CLASSES];
    classes.for_each(|class| votes[class as usize] += 1);
    let winner = (0..CLASSES).rev().max_by_key(|class| votes[*class]);
    winner.expect("there are classes") as u8
}

fn point(random: &mut Random) -> Point {
    std::array::from_fn(|_| random.below(1 << 30) as f64 / (1 << 30) as f64)
}

fn points() -> impl Iterator<Item = (Point, u8)> {
    let mut random = Random::new(0x6b64);
    (0..POINTS).map(move |_| (point(&mut random), random.below(CLASSES as u64) as u8))
}

fn samples(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut file = Vec::with_capacity(count * SAMPLE_BYTES);
    for n in 0..count {
        point(&mut random).iter().for_each(|place| file.extend_from_slice(&place.to_le_bytes()));
        file.resize((n + 1) * SAMPLE_BYTES, random.below(256) as u8);
    }
    file
}

/// Where the sample lies. None for one that was cut short, or lies nowhere.
fn place(sample: &[u8]) -> Option<Point> {
    let (coordinates, _) = sample.as_chunks::<8>();
    let place: Point = coordinates
        .get(..DIMENSIONS)?
        .iter()
        .map(|bytes| f64::from_le_bytes(*bytes))
        .collect::<Vec<_>>()
        .try_into()
        .ok()?;
    place.iter().all(|coordinate| coordinate.is_finite()).then_some(place)
}

impl App for Knn {
    fn prepare(&self, shelf: &Shelf, _items: usize) -> Result<()> {
        write_inputs(shelf, DIR, &self.inputs)
    }

    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64> {
        desk.read(shelf, &input(DIR, n % INPUTS))?;
        let mut result = 0u64;
        for sample in desk.input.chunks(SAMPLE_BYTES) {
            let place = place(sample).ok_or_else(|| malformed("a sample without a place"))?;
            result = result.wrapping_mul(31).wrapping_add(self.classify(&place)?.into());
        }
        Ok(result)
    }

    /// It writes nothing.
    fn collect(&self, _: &Shelf, _: &mut Desk, _items: usize) -> Result<u64> {
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::bed::Bed;
    use super::*;

    /// All points, sorted by distance.
    fn by_force(sample: &Point) -> u8 {
        let mut all: Vec<(f64, u8)> =
            points().map(|(point, class)| (squared_euclidean(&point, sample), class)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        most_frequent(all[..NEIGHBOURS].iter().map(|(_, class)| *class))
    }

    #[test]
    fn classes_are_those_that_a_look_at_every_point_gives() {
        let (bed, app) = (Bed::new(), Knn::new(16).unwrap());
        app.prepare(&bed.shelf, 2).unwrap();
        for n in 0..2 {
            let classes: Vec<u8> =
                app.inputs[n].chunks(SAMPLE_BYTES).map(|sample| by_force(&place(sample).unwrap())).collect();
            assert_eq!(classes.len(), FILE_BYTES / 16 / SAMPLE_BYTES);
            assert!(classes.iter().any(|class| *class != classes[0]));
            let want =
                classes.iter().fold(0u64, |sum, class| sum.wrapping_mul(31).wrapping_add((*class).into()));
            assert_eq!(app.work(&bed.shelf, &mut Desk::default(), n).unwrap(), want);
        }
    }

    #[test]
    fn a_vote_goes_to_the_most_and_a_tie_to_the_smallest() {
        assert_eq!(most_frequent([3, 1, 3].into_iter()), 3);
        assert_eq!(most_frequent([5, 1, 3].into_iter()), 1);
    }

    #[test]
    fn a_sample_without_a_place_is_none() {
        assert_eq!(place(&[0; DIMENSIONS * 8 - 1]), None);
        assert_eq!(place(&f64::NAN.to_le_bytes().repeat(DIMENSIONS)), None);
        assert_eq!(place(&[0; DIMENSIONS * 8]), Some([0.0; DIMENSIONS]));
    }
}
