//! Whole numbers within bounds.

use std::ops::{Bound, RangeBounds};

/// A parser of numbers that lie in a range, whose error says which do.
pub fn whole<T: TryFrom<u64>>(
    range: impl RangeBounds<u64> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let given = text.parse().ok().filter(|number| range.contains(number));
        given.and_then(|number| T::try_from(number).ok()).ok_or_else(|| expected::<T>(&range, text))
    }
}

fn expected<T>(range: &impl RangeBounds<u64>, got: &str) -> String {
    let least = match range.start_bound() {
        Bound::Included(&least) => least,
        Bound::Excluded(&below) => below + 1,
        Bound::Unbounded => 0,
    };
    let most = match range.end_bound() {
        Bound::Included(&most) => Some(most),
        Bound::Excluded(&above) => Some(above - 1),
        Bound::Unbounded => None,
    };
    // A number of digits that is refused, and not for being too small.
    let large =
        got.bytes().all(|byte| byte.is_ascii_digit()) && got.parse().map_or(!got.is_empty(), |n: u64| n >= least);
    match most.or_else(|| large.then(largest::<T>)) {
        Some(most) => format!("expected a whole number from {least} to {most}"),
        None => at_least(least),
    }
}

/// The largest number of an unsigned type.
fn largest<T>() -> u64 {
    u64::MAX >> (64 - 8 * size_of::<T>().clamp(1, 8))
}

/// What is expected where only the smallest number is known.
fn at_least(least: u64) -> String {
    match least {
        0 => "expected a whole number, 0 or more".to_owned(),
        least => format!("expected a whole number of at least {least}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_of_a_range_are_told_the_range() {
        let error = |text: &str| whole::<u16>(1..)(text).unwrap_err();
        assert_eq!(whole::<u16>(1..)("65535"), Ok(65535));
        for (text, wanted) in [
            ("0", "expected a whole number of at least 1"),
            ("x", "expected a whole number of at least 1"),
            ("", "expected a whole number of at least 1"),
            ("-1", "expected a whole number of at least 1"),
            ("65536", "expected a whole number from 1 to 65535"),
            ("99999999999999999999", "expected a whole number from 1 to 65535"),
        ] {
            assert_eq!(error(text), wanted, "{text}");
        }
        assert_eq!(whole::<u32>(0..=1000)("2000"), Err("expected a whole number from 0 to 1000".to_owned()));
        assert_eq!(whole::<u64>(0..)("-1"), Err("expected a whole number, 0 or more".to_owned()));
        assert_eq!(whole::<u64>(0..)("18446744073709551615"), Ok(u64::MAX));
    }
}
