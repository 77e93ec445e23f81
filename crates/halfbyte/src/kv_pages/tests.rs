use super::*;
use std::collections::BTreeSet;

/// What a sequence should have: names of pages, each given out once.
struct Model {
    sequence: Sequence,
    pages: Vec<u64>,
}

/// Pages that some sequence has.
fn taken(models: &[Model]) -> BTreeSet<u64> {
    models.iter().flat_map(|model| model.pages.iter().copied()).collect()
}

/// Every name of the models is one page of the books, and no two are the same.
fn compare(books: &Pages, models: &[Model]) {
    let mut numbers = BTreeMap::new();
    for model in models {
        let pages = books.of(model.sequence).unwrap();
        assert_eq!(pages.len(), model.pages.len());
        for (&name, &page) in model.pages.iter().zip(pages) {
            assert_eq!(*numbers.entry(name).or_insert(page), page);
            assert!((page as usize) < books.numbered(0));
        }
    }
    assert_eq!(numbers.values().collect::<BTreeSet<_>>().len(), numbers.len(), "two names of one page");
    assert_eq!(books.free(), books.budget() - taken(models).len());
    assert!(books.numbered(0) <= books.budget());
}

#[test]
fn random_walks_count_as_a_model_does() {
    let (mut full, mut copies) = (0, 0);
    for seed in 0..20u64 {
        let mut state = seed * 977 + 1;
        let mut below = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let (mut books, mut models, mut names) = (Pages::new(1 + below(60)), Vec::<Model>::new(), 0);
        for _ in 0..400 {
            let at = below(models.len().max(1));
            match below(11) {
                0 => models.push(Model { sequence: books.begin(), pages: Vec::new() }),
                _ if models.is_empty() => {}
                1 => {
                    let ended = models.swap_remove(at).sequence;
                    books.end(ended).unwrap();
                    assert!(books.end(ended).is_err() && books.of(ended).is_err() && books.take(ended, 0, 1).is_err());
                }
                2 | 5 | 6 => {
                    let shared = (models[at].pages.len() + 1).saturating_sub(below(3));
                    match books.share(models[at].sequence, shared) {
                        Ok(sequence) => {
                            let pages = models[at].pages[..shared].to_vec();
                            models.push(Model { sequence, pages });
                        }
                        Err(error) => {
                            assert!(shared > models[at].pages.len(), "{error}");
                        }
                    }
                }
                3 | 4 => {
                    let kept = below(models[at].pages.len() + 2);
                    books.keep(models[at].sequence, kept).unwrap();
                    models[at].pages.truncate(kept);
                }
                _ => {
                    // Only the last page is written to where pages are shared, as sequences do that grow.
                    let has = models[at].pages.len();
                    let first = has.saturating_sub(below(2)) * PAGE_LENGTH + below(PAGE_LENGTH);
                    let end = first + below(3 * PAGE_LENGTH);
                    let (sequence, index) = (models[at].sequence, first / PAGE_LENGTH);
                    let before: Vec<u32> = books.of(sequence).unwrap().to_vec();
                    let others = models.iter().enumerate().filter(|&(i, _)| i != at);
                    let mut others = others.flat_map(|(_, model)| &model.pages);
                    let copied = end > first
                        && models[at].pages.get(index).is_some_and(|name| others.any(|other| other == name));
                    let more = if end > first { end.div_ceil(PAGE_LENGTH).saturating_sub(has) } else { 0 };
                    let missing = more + usize::from(copied);
                    if end > first {
                        assert_eq!(books.missing(sequence, first, end), missing);
                    }
                    let (free, numbered) = (books.free(), books.numbered(missing));
                    match books.take(sequence, first, end) {
                        Ok(copy) => {
                            assert!(missing <= free);
                            assert_eq!((copy.is_some(), books.numbered(0)), (copied, numbered));
                            if let Some(Copied { from, to }) = copy {
                                assert_eq!((before[index], books.of(sequence).unwrap()[index]), (from, to));
                                models[at].pages[index] = names;
                                copies += 1;
                            }
                            models[at].pages.extend((0..more as u64).map(|i| names + 1 + i));
                            names += 1 + more as u64;
                        }
                        Err(Error::CacheFull { needed, free: positions }) => {
                            assert!(missing > free);
                            assert_eq!((needed, positions), (missing * PAGE_LENGTH, free * PAGE_LENGTH));
                            assert_eq!((books.of(sequence).unwrap(), books.free()), (before.as_slice(), free));
                            full += 1;
                            books.end(sequence).unwrap();
                            models.swap_remove(at);
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            }
            compare(&books, &models);
        }
        models.iter().for_each(|model| books.end(model.sequence).unwrap());
        assert_eq!(books.free(), books.budget());
    }
    assert!(full > 100 && copies > 100, "{full} full, {copies} copies");
}

#[test]
fn sequences_of_other_books_are_refused() {
    let (mut books, mut other) = (Pages::new(3), Pages::new(3));
    let foreign = other.begin();
    assert!(other.take(foreign, 0, 200).unwrap().is_none());
    let errors = [
        books.end(foreign).unwrap_err(),
        books.of(foreign).unwrap_err(),
        books.share(foreign, 0).unwrap_err(),
        books.keep(foreign, 0).unwrap_err(),
        books.take(foreign, 0, 1).unwrap_err(),
    ];
    for error in errors {
        let text = error.to_string();
        assert!(text.starts_with("kv cache: expected ") && text.contains(", got "), "{text}");
    }
    assert_eq!((books.free(), books.missing(foreign, 0, 129), other.free()), (3, 2, 1));
}
