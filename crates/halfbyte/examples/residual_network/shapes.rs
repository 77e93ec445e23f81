//! Pictures of shapes: one in each image, of any place, size and colours, with noise over all.

use super::random::Random;

/// Whether a point of the shape's own square, from −1 to 1 down and across, belongs to it.
type Inside = fn(f32, f32) -> bool;

/// The classes.
pub const SHAPES: [(&str, Inside); 8] = [
    ("disc", |y, x| y * y + x * x < 1.0),
    ("ring", |y, x| (0.4..1.0).contains(&(y * y + x * x))),
    ("square", |_, _| true),
    ("frame", |y, x| y.abs().max(x.abs()) > 0.6),
    ("cross", |y, x| y.abs().min(x.abs()) < 0.25),
    ("rows", |y, _| (y * 2.5).rem_euclid(2.0) < 1.0),
    ("columns", |_, x| (x * 2.5).rem_euclid(2.0) < 1.0),
    ("board", |y, x| ((y * 2.5).rem_euclid(2.0) < 1.0) != ((x * 2.5).rem_euclid(2.0) < 1.0)),
];

/// Draws images `[image, size, size, 3]` of bytes, the classes in turn.
pub fn draw(images: usize, size: usize, seed: u64) -> (Vec<u8>, Vec<usize>) {
    let mut random = Random(seed);
    let classes: Vec<usize> = (0..images).map(|image| image % SHAPES.len()).collect();
    let mut pixels = Vec::with_capacity(images * size * size * 3);
    for &class in &classes {
        let radius = 0.35 + 0.1 * random.uniform();
        let [y, x] = [(); 2].map(|()| radius + (1.0 - 2.0 * radius) * random.uniform());
        let light = [(); 3].map(|()| 0.8 + 0.2 * random.uniform());
        let dark = [(); 3].map(|()| 0.2 * random.uniform());
        for pixel in 0..size * size {
            let own = |at: usize, center: f32| ((at as f32 + 0.5) / size as f32 - center) / radius;
            let (v, u) = (own(pixel / size, y), own(pixel % size, x));
            let inside = v.abs() < 1.0 && u.abs() < 1.0 && SHAPES[class].1(v, u);
            let colour = if inside { light } else { dark };
            pixels.extend(colour.map(|c| (255.0 * (c + 0.05 * random.normal())).clamp(0.0, 255.0) as u8));
        }
    }
    (pixels, classes)
}
