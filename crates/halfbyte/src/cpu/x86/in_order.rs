//! Scales and offsets of panels, read one group after the other.

/// For an instruction set whose module has `load_f16`, `load_bf16`, `load_f32`, `store_f32` and `product`, and what a packed weight is:
/// 16 numbers are `$sixteen`.
///
/// Whole multiples of halves are made for a run of groups at once: made for each group they took a fifth of the time of a product of
/// one row. Other numbers are loaded where they lie.
macro_rules! in_order {
    ($features:literal, $sixteen:ty) => {
        /// The numbers of a panel's group, from element `at` on.
        #[inline]
        #[target_feature(enable = $features)]
        pub(in crate::cpu) fn load_per_group(v: &PerGroup, at: usize) -> $sixteen {
            match v {
                PerGroup::F16(v) => load_f16(&v[at..]),
                PerGroup::BF16(v) => load_bf16(&v[at..]),
                PerGroup::F32(v) => load_f32(&v[at..]),
                PerGroup::Multiples(multiples) => {
                    let sixteen = multiples.sixteen(at);
                    product(load_f16(sixteen.halves), load_factors(sixteen))
                }
            }
        }

        /// 16 factors, a byte with sign each.
        #[inline]
        #[target_feature(enable = $features)]
        fn load_factors(v: Sixteen<'_>) -> __m128i {
            let factors = &v.factors[..16];
            // SAFETY: 16 bytes, checked above.
            let bytes = unsafe { _mm_loadu_si128(factors.as_ptr().cast()) };
            _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi32_si128(v.shift as i32)), _mm_set1_epi8(v.mask as i8))
        }

        /// Scales of `P` panels, and their offsets if there are any: [`Numbers::to`] a group, then each panel's.
        pub(in crate::cpu) struct Numbers<'a, const P: usize> {
            w: &'a CpuN16,
            /// None where all of them lie as they are multiplied.
            made: Option<[InOrder<'a, P>; 2]>,
        }

        impl<'a, const P: usize> Numbers<'a, P> {
            /// From panel `panel` on, with room for those that are made.
            #[inline]
            pub fn new(w: &'a CpuN16, panel: usize, room: &'a mut Room<P>) -> Self {
                let offsets = if let PackedZeros::Float(offsets) = w.zeros() { offsets } else { w.scales() };
                let of_multiples = [w.scales(), offsets].iter().any(|of| matches!(of, PerGroup::Multiples(_)));
                let [for_scales, for_offsets] = room;
                let made = of_multiples.then(|| {
                    let in_order = |numbers, room| InOrder::new(numbers, panel, w.groups(), room);
                    [in_order(w.scales(), for_scales), in_order(offsets, for_offsets)]
                });
                Self { w, made }
            }

            /// Goes to a group, which is read from then on.
            #[inline]
            #[target_feature(enable = $features)]
            pub fn to(&mut self, group: usize) {
                if let Some([scales, offsets]) = &mut self.made {
                    scales.to(group);
                    if let PackedZeros::Float(_) = self.w.zeros() {
                        offsets.to(group);
                    }
                }
            }

            /// The scales of a panel, of which the group's begin at `at`.
            #[inline]
            #[target_feature(enable = $features)]
            pub fn scale(&self, p: usize, at: usize) -> $sixteen {
                match &self.made {
                    None => load_per_group(self.w.scales(), at),
                    Some([scales, _]) => scales.load(p),
                }
            }

            /// The offsets of a panel, if there are any.
            #[inline]
            #[target_feature(enable = $features)]
            pub fn offset(&self, p: usize, at: usize) -> Option<$sixteen> {
                let PackedZeros::Float(offsets) = self.w.zeros() else { return None };
                match &self.made {
                    None => Some(load_per_group(offsets, at)),
                    Some([_, offsets]) => Some(offsets.load(p)),
                }
            }
        }

        /// Numbers of `P` panels' groups.
        struct InOrder<'a, const P: usize> {
            numbers: &'a PerGroup,
            groups: usize,
            /// Where the groups of each panel begin.
            rows: [usize; P],
            /// The one that is read.
            group: usize,
            /// The first group of the run that is made; none if it is the last that there can be.
            first: usize,
            made: &'a mut Made<P>,
        }

        /// A run of each of `P` panels.
        pub(in crate::cpu) type Made<const P: usize> = [[std::mem::MaybeUninit<[f32; PANEL]>; RUN]; P];

        /// Of scales, then of offsets. Whoever multiplies has it, so that it is not moved.
        pub(in crate::cpu) type Room<const P: usize> = [Made<P>; 2];

        /// Room that holds nothing yet.
        #[inline(always)]
        pub(in crate::cpu) fn room<const P: usize>() -> Room<P> {
            [[[std::mem::MaybeUninit::uninit(); RUN]; P]; 2]
        }

        /// Groups of a run.
        pub(in crate::cpu) const RUN: usize = 16;

        impl<'a, const P: usize> InOrder<'a, P> {
            #[inline]
            fn new(numbers: &'a PerGroup, panel: usize, groups: usize, made: &'a mut Made<P>) -> Self {
                let rows = std::array::from_fn(|p| (panel + p) * groups);
                Self { numbers, groups, rows, group: 0, first: usize::MAX, made }
            }

            #[inline]
            #[target_feature(enable = $features)]
            fn to(&mut self, group: usize) {
                self.group = group;
                if self.first != group - group % RUN {
                    self.make(group);
                }
            }

            /// Makes the run of a group.
            #[inline(never)]
            #[target_feature(enable = $features)]
            fn make(&mut self, group: usize) {
                assert!(group < self.groups);
                self.first = group - group % RUN;
                if let PerGroup::Multiples(multiples) = self.numbers {
                    let len = RUN.min(self.groups - self.first);
                    make(multiples, self.rows.map(|row| row + self.first), len, self.made);
                }
            }

            #[inline]
            #[target_feature(enable = $features)]
            fn load(&self, p: usize) -> $sixteen {
                match self.numbers {
                    PerGroup::Multiples(_) => {
                        assert!(self.first <= self.group);
                        // SAFETY: the run of the group is made: `to` does so, and `make` writes as many groups as there are.
                        load_f32(unsafe { self.made[p][self.group % RUN].assume_init_ref() })
                    }
                    numbers => load_per_group(numbers, (self.rows[p] + self.group) * PANEL),
                }
            }
        }

        /// Makes `len` groups from some rows of `[panel][group]` on.
        #[inline(never)]
        #[target_feature(enable = $features)]
        fn make<const P: usize>(multiples: &PanelMultiples, rows: [usize; P], len: usize, made: &mut Made<P>) {
            let run = multiples.run();
            assert!(len.is_multiple_of(run));
            for (made, row) in made.iter_mut().zip(rows) {
                for (made, row) in made[..len].chunks_exact_mut(run).zip((row..).step_by(run)) {
                    let (halves, factors, nibbles) = multiples.run_at(row);
                    let of_factors = factors.as_ptr().cast::<i8>();
                    for (line, ahead) in [(halves.as_ptr().cast(), 64), (of_factors, 256), (of_factors, 320)] {
                        // Groups that come soon; a prefetch never faults.
                        _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(ahead));
                    }
                    let halves = load_f16(halves);
                    // SAFETY: 16 bytes.
                    let load = |bytes: &[u8; PANEL]| unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
                    let factors = factors.as_chunks::<PANEL>().0;
                    if nibbles {
                        let mask = _mm_set1_epi8(15);
                        for (two, bytes) in made.as_chunks_mut::<2>().0.iter_mut().zip(factors) {
                            let bytes = load(bytes);
                            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
                            store_f32(product(halves, _mm_and_si128(bytes, mask)), two[0].write([0.0; PANEL]));
                            store_f32(product(halves, high), two[1].write([0.0; PANEL]));
                        }
                    } else {
                        for (out, bytes) in made.iter_mut().zip(factors) {
                            store_f32(product(halves, load(bytes)), out.write([0.0; PANEL]));
                        }
                    }
                }
            }
        }
    };
}

pub(super) use in_order;
