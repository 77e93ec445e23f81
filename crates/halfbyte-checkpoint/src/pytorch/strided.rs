//! Views of a storage whose elements lie in another order, or with others between them.

/// The elements of a view, row-major. `bytes` begin with its first element and reach to its last; strides are in elements.
pub(crate) fn gathered(bytes: &[u8], shape: &[usize], strides: &[usize], element: usize) -> Vec<u8> {
    let count: usize = shape.iter().product();
    let mut out = Vec::with_capacity(count * element);
    let (Some((&inner, outer)), Some((&step, outer_strides))) = (shape.split_last(), strides.split_last()) else {
        return bytes[..element].to_vec();
    };
    if count == 0 {
        return out;
    }
    let mut index = vec![0usize; outer.len()];
    loop {
        let row: usize = index.iter().zip(outer_strides).map(|(i, stride)| i * stride).sum();
        if step == 1 {
            out.extend_from_slice(&bytes[row * element..(row + inner) * element]);
        } else {
            for i in 0..inner {
                let at = (row + i * step) * element;
                out.extend_from_slice(&bytes[at..at + element]);
            }
        }
        // The next index, the last dimension first.
        let Some(moved) = (0..outer.len()).rev().find(|&d| index[d] + 1 < outer[d]) else { return out };
        index[moved] += 1;
        index[moved + 1..].fill(0);
    }
}
