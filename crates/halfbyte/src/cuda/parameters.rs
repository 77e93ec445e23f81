//! Structs that a launcher fills in and a kernel reads: declared once in Rust, checked in C++ whenever a kernel is compiled.
//!
//! `parameters!` declares such a struct and records its [`StructLayout`]. The [`Source`] of a kernel
//! names the layouts of its parameters, and what the compiler is given ends in one `static_assert` for the size of each struct
//! and one for the offset and the size of each field. Rust and C++ therefore have the same structs, with fields of the same
//! names, or the kernel does not compile: no GPU is needed to find out.
//!
//! [`Source`]: super::sources::Source

use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use std::fmt::Write;

/// How a struct lies in memory, as C++ has to have it.
#[derive(Debug, PartialEq, Eq)]
pub struct StructLayout {
    /// Its name in both languages.
    pub name: &'static str,
    /// Its size, padding included.
    pub bytes: usize,
    /// Its fields, all of them.
    pub fields: &'static [FieldLayout],
}

/// How a field lies in its struct.
#[derive(Debug, PartialEq, Eq)]
pub struct FieldLayout {
    /// Its name in both languages.
    pub name: &'static str,
    /// Bytes before it.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
    /// Its own layout, if it is a struct.
    pub nested: Option<&'static StructLayout>,
    /// Whether C++ has the fields of that struct here, and not the struct.
    pub flat: bool,
}

/// The type of a field: a number of C++, an address as `u64`, or a struct of [`parameters!`].
pub(in crate::cuda) trait Field: Pod {
    /// The layout of a struct.
    const NESTED: Option<&'static StructLayout> = None;
    /// Whether C++ has the fields of the struct in its place.
    const FLAT: bool = false;
}

impl Field for u32 {}
impl Field for i32 {}
impl Field for u64 {}
impl Field for f32 {}
impl Field for f64 {}

/// The source names the layout of what is in it besides.
impl<T: Field, const N: usize> Field for [T; N] {}

/// A struct in Rust whose fields are those of the struct around it in C++: a part that several structs have, or the base of a
/// struct that is derived from it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub(in crate::cuda) struct Flat<T>(pub T);

impl<T: Field> Field for Flat<T> {
    const NESTED: Option<&'static StructLayout> = T::NESTED;
    const FLAT: bool = true;
}

/// A struct that a kernel takes as a parameter; [`parameters!`] implements it.
pub(in crate::cuda) trait Parameters: Pod {
    /// Its layout.
    const LAYOUT: &'static StructLayout;
}

impl StructLayout {
    /// Assertions in C++ that a struct of this name has this layout, and so for the structs in it.
    pub fn assertions(&self) -> String {
        let mut text = String::new();
        self.write_fields(self.name, 0, &mut text);
        self.write_size(&mut text);
        text
    }

    /// Those of the fields, which lie `base` bytes behind the beginning of a struct of C++.
    fn write_fields(&self, name: &str, base: usize, text: &mut String) {
        for FieldLayout { name: field, offset, bytes, nested, flat } in self.fields {
            let offset = base + offset;
            match nested {
                Some(nested) if *flat => {
                    nested.write_fields(name, offset, text);
                    continue;
                }
                Some(nested) => text.push_str(&nested.assertions()),
                None => {}
            }
            // `offsetof` as the run-time compiler has it, which knows neither that name nor `__builtin_offsetof`. Writing to a
            // string does not fail.
            let _ = writeln!(
                text,
                "static_assert(__INTADDR__(&(({name}*)0)->{field}) == {offset} && sizeof({name}::{field}) == {bytes}, \
                 \"{name}.{field} has {bytes} bytes from byte {offset} on in Rust\");"
            );
        }
    }

    fn write_size(&self, text: &mut String) {
        let Self { name, bytes, .. } = self;
        let _ = writeln!(text, "static_assert(sizeof({name}) == {bytes}, \"{name} has {bytes} bytes in Rust\");");
    }
}

/// Declares structs that Rust and C++ share: plain data in C's order, each with its [`Parameters`].
///
/// A struct with padding does not compile: the padding is a field with a name, here and in C++. The type of a field is a
/// [`Field`]: structs declared by this macro may be fields of others.
macro_rules! parameters {
    ($(
        $(#[$of_struct:meta])*
        $public:vis struct $name:ident {
            $($(#[$of_field:meta])* $field_public:vis $field:ident: $type:ty),+ $(,)?
        }
    )+) => {$(
        $(#[$of_struct])*
        #[derive(Clone, Copy, ::bytemuck::Pod, ::bytemuck::Zeroable)]
        #[repr(C)]
        $public struct $name {
            $($(#[$of_field])* $field_public $field: $type),+
        }

        impl $crate::cuda::parameters::Field for $name {
            const NESTED: Option<&'static $crate::cuda::parameters::StructLayout> =
                Some(<Self as $crate::cuda::parameters::Parameters>::LAYOUT);
        }

        impl $crate::cuda::parameters::Parameters for $name {
            const LAYOUT: &'static $crate::cuda::parameters::StructLayout = &$crate::cuda::parameters::StructLayout {
                name: stringify!($name),
                bytes: size_of::<Self>(),
                fields: &[$($crate::cuda::parameters::FieldLayout {
                    name: stringify!($field),
                    offset: std::mem::offset_of!(Self, $field),
                    bytes: size_of::<$type>(),
                    nested: <$type as $crate::cuda::parameters::Field>::NESTED,
                    flat: <$type as $crate::cuda::parameters::Field>::FLAT,
                }),+],
            };
        }
    )+};
}
pub(in crate::cuda) use parameters;

/// Number of a type in the sources: `FloatType` of `include/floats.cuh`.
pub(in crate::cuda) fn float_type(dtype: Float) -> u32 {
    match dtype {
        Float::F16 => 0,
        Float::BF16 => 1,
        Float::F32 => 2,
    }
}

parameters! {
    /// A number for rows and one for columns, as sizes and steps of images have them.
    pub(in crate::cuda) struct Pair {
        rows: i32,
        columns: i32,
    }
}

impl From<[usize; 2]> for Pair {
    /// Of sizes below 2³¹.
    fn from([rows, columns]: [usize; 2]) -> Self {
        Self { rows: rows as i32, columns: columns as i32 }
    }
}
