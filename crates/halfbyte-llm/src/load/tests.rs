//! Loading in lanes.

use super::*;

/// Parts in their order, whoever loads them; of several that fail the first; lanes keep what is theirs.
#[test]
fn lanes_load_parts_in_their_order() {
    let weights = RandomWeights { format: None, head: None };
    for (lanes, parts) in [(1, 5), (3, 40), (8, 3), (4, 0)] {
        let mut loader = Loader::random(weights, LoadOptions::default()).unwrap();
        let load = |count: &mut usize, loader: &mut Loader<'_>, part: usize| {
            *count += 1;
            loader.vector("model.norm.weight", part)?;
            std::thread::sleep(std::time::Duration::from_micros((parts - part) as u64 * 50));
            Ok((part, *count))
        };
        let loaded = loader.in_lanes(lanes, parts, |_| 0, load).unwrap();
        assert!(loaded.iter().map(|(part, _)| *part).eq(0..parts), "{lanes} lanes: {loaded:?}");
        assert_eq!(loader.parameters(), (parts * parts.saturating_sub(1) / 2) as u64);
        // Each lane has counted its own.
        assert!(lanes > 1 || loaded.iter().all(|(part, count)| part + 1 == *count));
        let fail = |_: &mut (), _: &mut Loader<'_>, part: usize| match part % 7 {
            6 => Err(Error::invalid("part", "another", part.to_string())),
            _ => Ok(()),
        };
        let failed = loader.in_lanes(lanes, parts, |_| (), fail).map_err(|e| e.to_string());
        assert_eq!(failed.is_err(), parts > 6);
        assert!(failed.err().is_none_or(|e| e.ends_with("got 6")));
    }
}
