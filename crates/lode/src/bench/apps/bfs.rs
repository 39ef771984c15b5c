//! BFS: reads a serialised graph, builds it in memory, and searches it breadth first from a vertex.
//!
//! A file holds little-endian words of 32 bits: the numbers of vertices and edges; for each vertex where its edges begin,
//! and where the last one's end; and the vertices that edges lead to.

use lodestone::Result;

use super::app::{App, Desk, Shelf, input, malformed, write_inputs};
use crate::bench::Random;

const DIR: &str = "/bfs";
/// Of EasyIO's Table 1: what is read.
const FILE_BYTES: usize = 1 << 20;
const INPUTS: usize = 8;
/// Words of a file for each vertex: some thirty edges. The paper does not say how many there are, but that copies and
/// computation balance.
const WORDS_PER_VERTEX: usize = 32;
/// A vertex that the search does not reach.
const NEVER: u32 = u32::MAX;

pub struct Bfs {
    inputs: Vec<Vec<u8>>,
}

impl Bfs {
    /// With files of a `shrink`th of the size.
    pub fn new(shrink: usize) -> Bfs {
        let words = FILE_BYTES / shrink / 4;
        Bfs { inputs: (0..INPUTS).map(|n| Graph::random(n as u64 + 1, words).bytes()).collect() }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Graph {
    /// The edges of a vertex begin here in `targets`, and end where the next one's begin.
    begins: Vec<u32>,
    targets: Vec<u32>,
}

impl Graph {
    /// One whose file has so many words.
    fn random(seed: u64, words: usize) -> Graph {
        let mut random = Random::new(seed);
        let vertices = words / WORDS_PER_VERTEX;
        let edges = words - 3 - vertices;
        let mut begins: Vec<u32> = (0..vertices).map(|_| random.below(edges as u64 + 1) as u32).collect();
        begins.sort_unstable();
        begins[0] = 0;
        begins.push(edges as u32);
        Graph { begins, targets: (0..edges).map(|_| random.below(vertices as u64) as u32).collect() }
    }

    fn bytes(&self) -> Vec<u8> {
        let head = [self.begins.len() as u32 - 1, self.targets.len() as u32];
        let words = head.iter().chain(&self.begins).chain(&self.targets);
        words.flat_map(|word| word.to_le_bytes()).collect()
    }

    /// None where the file is none of a graph: a search finds every index in its place.
    fn parse(file: &[u8]) -> Option<Graph> {
        let (words, rest) = file.as_chunks::<4>();
        let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
        let (vertices, edges) = (words.next()?, words.next()?);
        let all = 3 + u64::from(vertices) + u64::from(edges);
        if !rest.is_empty() || file.len() as u64 != 4 * all {
            return None;
        }
        let begins: Vec<u32> = words.by_ref().take(vertices as usize + 1).collect();
        let targets: Vec<u32> = words.collect();
        let whole = begins[0] == 0 && begins.is_sorted() && begins.last() == Some(&edges);
        let inside = targets.iter().max().is_none_or(|last| *last < vertices);
        (whole && inside).then_some(Graph { begins, targets })
    }

    /// Of all vertices, in edges from this one. It is one of the graph's.
    fn distances(&self, from: u32) -> Vec<u32> {
        let mut distances = vec![NEVER; self.begins.len() - 1];
        let mut queue = Vec::with_capacity(distances.len());
        distances[from as usize] = 0;
        queue.push(from);
        let mut next = 0;
        while let Some(&vertex) = queue.get(next) {
            next += 1;
            let edges = self.begins[vertex as usize] as usize..self.begins[vertex as usize + 1] as usize;
            let further = distances[vertex as usize] + 1;
            for &target in &self.targets[edges] {
                if distances[target as usize] == NEVER {
                    distances[target as usize] = further;
                    queue.push(target);
                }
            }
        }
        distances
    }
}

/// How many vertices were reached, and the sum of their distances.
fn summary(distances: &[u32]) -> u64 {
    let reached = distances.iter().filter(|distance| **distance != NEVER);
    let (count, sum) = reached.fold((0u64, 0u64), |(count, sum), far| (count + 1, sum + u64::from(*far)));
    count << 32 | sum
}

impl App for Bfs {
    fn prepare(&self, shelf: &Shelf, _items: usize) -> Result<()> {
        write_inputs(shelf, DIR, &self.inputs)
    }

    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64> {
        desk.read(shelf, &input(DIR, n % INPUTS))?;
        let graph = Graph::parse(&desk.input).ok_or_else(|| malformed("no graph"))?;
        let vertices = graph.begins.len() - 1;
        if vertices == 0 {
            return Err(malformed("a graph without vertices"));
        }
        Ok(summary(&graph.distances((n % vertices) as u32)))
    }

    /// It writes nothing.
    fn collect(&self, _: &Shelf, _: &mut Desk, _items: usize) -> Result<u64> {
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};

    use super::super::bed::Bed;
    use super::*;

    /// By a matrix of neighbours and a queue of vertices with their distances.
    fn by_matrix(graph: &Graph, from: usize) -> Vec<u32> {
        let vertices = graph.begins.len() - 1;
        let mut matrix = vec![vec![false; vertices]; vertices];
        for (row, edges) in matrix.iter_mut().zip(graph.begins.windows(2)) {
            (edges[0]..edges[1]).for_each(|edge| row[graph.targets[edge as usize] as usize] = true);
        }
        let mut found = vec![NEVER; vertices];
        let (mut queue, mut seen) = (VecDeque::from([(from, 0)]), HashSet::from([from]));
        while let Some((vertex, far)) = queue.pop_front() {
            found[vertex] = far;
            for next in (0..vertices).filter(|next| matrix[vertex][*next]) {
                if seen.insert(next) {
                    queue.push_back((next, far + 1));
                }
            }
        }
        found
    }

    #[test]
    fn distances_are_those_that_a_matrix_gives() {
        let (bed, app) = (Bed::new(), Bfs::new(256));
        app.prepare(&bed.shelf, INPUTS).unwrap();
        for n in 0..INPUTS {
            let graph = Graph::random(n as u64 + 1, FILE_BYTES / 256 / 4);
            assert_eq!(Graph::parse(&app.inputs[n]).unwrap(), graph);
            let want = by_matrix(&graph, n);
            assert_eq!(graph.distances(n as u32), want);
            assert!(want.iter().any(|far| *far > 1) && want.iter().any(|far| *far != NEVER));
            assert_eq!(app.work(&bed.shelf, &mut Desk::default(), n).unwrap(), summary(&want));
        }
    }

    #[test]
    fn what_is_no_graph_is_refused() {
        let good = Graph { begins: vec![0, 1, 2], targets: vec![1, 0] };
        assert_eq!(Graph::parse(&good.bytes()), Some(good));
        let of = |words: &[u32]| {
            Graph::parse(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[2, 2, 0, 1, 2, 1, 2]), None, "an edge to nowhere");
        assert_eq!(of(&[2, 2, 0, 3, 2, 1, 0]), None, "edges that end before they begin");
        assert_eq!(of(&[2, 2, 0, 1, 1, 1, 0]), None, "an edge of no vertex");
        assert_eq!(of(&[2, 2, 0, 1, 2, 1]), None, "cut short");
        assert_eq!(of(&[u32::MAX, u32::MAX, 0]), None);
    }

    #[test]
    fn inputs_have_the_size_of_table_1() {
        assert_eq!(Bfs::new(1).inputs[0].len(), FILE_BYTES);
    }
}
